"""A request on its way through the engine, and what one step does for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from seerjax.engine import sizes
from seerjax.engine.sizes import EngineConfig
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.ops import penalties
from seerjax.types import Completion, Request, SamplingRows

# An answer so far to the ids that may follow it, u32[w] as of `SamplingRows.mask`: a pure function.
Mask = Callable[[Sequence[int]], np.ndarray]


# Token ids with their log-probabilities, the likeliest first, of equals the lowest id.
Likeliest = tuple[tuple[int, float], ...]


@dataclasses.dataclass(eq=False)
class ReadingState:
  """A text that is read, not answered: what may come after it, and after drafts behind it.

  Attributes:
    num_top: tokens to be told of at each place.
    drafts: paths of token ids, to be read with it where there is room.
    found: by path, () for the text itself, what is likeliest behind it; empty until it is read.
  """

  num_top: int
  drafts: tuple[tuple[int, ...], ...]
  found: dict[tuple[int, ...], Likeliest] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class SequenceState:
  """A request, its answer so far, and the memory it holds.

  Attributes:
    request: what was asked.
    tokens: prompt and answer; `num_written` of them have their keys in pages.
    instance: where its pages are, or will be.
    stream: of its text, None without a tokenizer.
    sampling: its parameters as one row.
    limit: most tokens, prompt included, before it pauses or ends.
    reserves: whether it runs only with pages for all tokens up to `limit`; else its pages grow with
      its answer.
    pages: in order of position; none while it waits for memory.
    reach: most tokens, prompt included, that `pages` hold.
    page_row: i32[p], `pages` as a row of the page table.
    num_written: positions whose keys are written.
    logprobs: of the answer's tokens, processed distribution.
    raw_logprobs: of the same tokens, softmax of the logits.
    text: the answer so far, cut before a stop string.
    streamed: characters of `text` given out.
    mask: what may stand at the answer's next place, None for anything.
    adapter: number of its adapter among the engine's, 0 for the base.
    reading: what is asked of it instead of an answer, None of a request that is answered.
    is_background: whether nobody waits for it, so that it gets what others leave.
  """

  request: Request
  tokens: list[int]
  instance: int
  stream: tokenizer_lib.TextStream | None
  sampling: SamplingRows
  limit: int
  reserves: bool = True
  pages: list[int] = dataclasses.field(default_factory=list)
  page_row: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  reach: int = 0
  num_written: int = 0
  logprobs: list[float] = dataclasses.field(default_factory=list)
  raw_logprobs: list[float] = dataclasses.field(default_factory=list)
  text: str = ""
  streamed: int = 0
  mask: Mask | None = None
  adapter: int = 0
  reading: ReadingState | None = None
  is_background: bool = False

  @property
  def num_prompt(self) -> int:
    """Tokens of the prompt."""
    return len(self.request.prompt)

  @property
  def num_generated(self) -> int:
    """Tokens of the answer."""
    return len(self.tokens) - len(self.request.prompt)

  @property
  def is_prefilling(self) -> bool:
    """Whether positions of the prompt are still unwritten."""
    return self.num_written < self.num_prompt - 1 or not self.pages

  @functools.cached_property
  def prompt_ids(self) -> np.ndarray:
    """The prompt's tokens, each once, which penalties ask for at every step."""
    return penalties.distinct(self.request.prompt)

  @property
  def end(self) -> int:
    """Most tokens, prompt included, that it can have before it needs more pages or ends."""
    return min(self.limit, self.reach)

  def extend(self, chunk_tokens: int | None, reserved_tokens: int = 0) -> None:
    """Sets the limit to `chunk_tokens` more tokens of answer; None is all that was asked for.

    A foreground request without chunks takes its pages as its answer grows, unless
    `reserved_tokens` is 0.
    """
    most = self.num_prompt + self.request.sampling.max_tokens
    self.limit = most if chunk_tokens is None else min(most, len(self.tokens) + chunk_tokens)
    self.reserves = chunk_tokens is not None or self.is_background or not reserved_tokens

  def wanted_pages(self, config: EngineConfig) -> int:
    """Returns the pages, those that it holds included, that it takes when it gets some."""
    tokens = self.limit
    if not self.reserves:
      tokens = sizes.next_tokens(config, len(self.tokens), self.limit)
    return sizes.pages_for(tokens, config.page_size)

  def expected_pages(self, config: EngineConfig) -> int:
    """Returns the pages, those that it holds included, that admission counts for it."""
    tokens = self.limit
    if not self.reserves:
      tokens = sizes.expected_tokens(config, len(self.tokens), self.limit)
    return sizes.pages_for(tokens, config.page_size)

  def hold(self, pages: list[int], table_width: int, page_size: int) -> None:
    """Takes `pages` (all of them, in order) as its memory."""
    self.pages = pages
    # The last token is never read back, so it needs no position.
    self.reach = len(pages) * page_size + 1
    self.page_row = np.zeros(table_width, np.int32)
    self.page_row[: len(pages)] = pages

  def completion(self, finish_reason: str, policy_version: int, error: str = "") -> Completion:
    """Returns the answer so far."""
    return Completion(
      request_id=self.request.request_id,
      tokens=tuple(self.tokens[self.num_prompt :]),
      behaviour_logprobs=np.asarray(self.logprobs, np.float32),
      raw_logprobs=np.asarray(self.raw_logprobs, np.float32),
      text=self.text,
      finish_reason=finish_reason,
      policy_version=policy_version,
      error=error,
    )

  def truncate(self, num_tokens: int) -> None:
    """Drops the answer behind `num_tokens` tokens, prompt included; its text stays."""
    del self.tokens[num_tokens:]
    del self.logprobs[self.num_generated :], self.raw_logprobs[self.num_generated :]


class DraftPath(NamedTuple):
  """A path of the tree of drafted tokens that one step verifies, from its root to a leaf.

  Rows are counted from the sequence's last token, the root: that is 0, and rows before it are
  settled positions of the same step.

  Attributes:
    tokens: the draft, whole.
    page_row: i32[p], the pages in which all of its keys stand after the step.
    rows: of each of its tokens.
    num_shared: how many of its first tokens are computed as an earlier path's; the others are its
      own, and their rows follow one another.
    copied: rows whose keys are copied to this path's pages: the settled ones that its own pages
      lack, and those of its shared tokens; their positions follow one another.
    scratch: the pages of `page_row` that are this path's own; none for the first path, which is
      written to the sequence's pages.
  """

  tokens: tuple[int, ...]
  page_row: np.ndarray
  rows: tuple[int, ...]
  num_shared: int = 0
  copied: tuple[int, ...] = ()
  scratch: tuple[int, ...] = ()


class ScheduledRows(NamedTuple):
  """What one step computes for a sequence.

  Rows of a step, from `first_row` on: `count` positions from the first unwritten one on, then the
  tokens of the first path, and for each further path those of its tokens that are its own.

  Attributes:
    sequence: whose.
    count: positions written for good.
    first_row: in the step.
    paths: of the tree of drafts; only where the rows reach the sequence's end.
  """

  sequence: SequenceState
  count: int
  first_row: int
  paths: tuple[DraftPath, ...] = ()

  @property
  def is_sampled(self) -> bool:
    """Whether its rows reach the sequence's end."""
    return self.sequence.num_written + self.count == len(self.sequence.tokens)

  @property
  def num_rows(self) -> int:
    """Rows of the step."""
    return self.count + self.num_drafted if self.paths else self.count  # Asked of all every step.

  @property
  def num_samples(self) -> int:
    """Rows that are sampled: the sequence's last position, and each drafted token."""
    return 1 + self.num_drafted if self.paths else int(self.is_sampled)

  @property
  def num_drafted(self) -> int:
    """Drafted tokens, those that paths share counted once."""
    return sum(len(path.tokens) - path.num_shared for path in self.paths)

  @property
  def num_copies(self) -> int:
    """Keys that are written to a further path's pages, too."""
    return sum(len(path.copied) for path in self.paths)


class StepOutput(NamedTuple):
  """What one visit added to one request.

  Attributes:
    request_id: of the request.
    tokens: sampled in this visit.
    text: of these tokens; what may still become a stop string is held back.
    finish_reason: why it ended, "" if it did not.
    error: what it met, where `finish_reason` is "error" (see `Completion`).
  """

  request_id: str
  tokens: tuple[int, ...]
  text: str
  finish_reason: str
  error: str = ""
