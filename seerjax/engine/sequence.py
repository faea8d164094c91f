"""State of a request in the engine, and the work that one step does for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from seerjax.engine import sizes
from seerjax.engine.sizes import EngineConfig
from seerjax.kv import owner as owner_lib
from seerjax.kv.holding import Holding
from seerjax.kv.owner import Owner
from seerjax.models import tokenizer as tokenizer_lib
from seerjax.ops import penalties
from seerjax.types import Completion, Request, SamplingRows

# Maps the response so far to a bitmask of allowed next ids, u32[w] like `SamplingRows.mask`. Pure.
Mask = Callable[[Sequence[int]], np.ndarray]


# Token ids with their log-probabilities, the likeliest first, ties by the lowest id.
TopLogprobs = tuple[tuple[int, float], ...]
# The log-probability of a prompt's token and the top tokens in its place, under softmax(logits).
PromptScore = tuple[float, TopLogprobs]


@dataclasses.dataclass(eq=False)
class ReadingState:
  """State of a prefill-only request for the top tokens after a text and its drafts.

  Attributes:
    num_top: number of top tokens at each position.
    drafts: paths of token ids after the text, evaluated as far as there is room.
    found: top tokens by path, () for the text itself; empty until the step has run.
  """

  num_top: int
  drafts: tuple[tuple[int, ...], ...]
  found: dict[tuple[int, ...], TopLogprobs] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, kw_only=True)
class SequenceState(Holding):
  """A request, its response so far, and the memory it holds.

  Its `tokens` are prompt and response.

  Attributes:
    name: the request's id.
    owner: owner of its keys and values, that of the request.
    request: the request.
    stream: detokenizer of the response, None without a tokenizer.
    sampling: sampling parameters as one row.
    limit: maximum tokens, prompt included, before it pauses or ends.
    reserves: whether pages for all tokens up to `limit` are allocated before it runs; otherwise
      its pages grow with the response.
    logprobs: log-probabilities of the response's tokens, processed distribution.
    raw_logprobs: log-probabilities of the same tokens, softmax of the logits.
    text: the response so far, cut before a stop string.
    streamed: number of characters of `text` that were streamed.
    mask: maps the response to the allowed next ids, None for all.
    adapter: index of its adapter among the engine's, 0 for the base weights.
    reading: state of a prefill-only request, None for a request that generates.
    num_top: number of top tokens returned at each position of the response.
    prompt_top: number of top tokens at each position of the prompt, if its tokens are scored; None
      if they are not, or once their scores were returned.
    prompt_scores: scores of the prompt's tokens so far; the first token has none.
    is_background: whether it has low priority and gets spare rows and pages only.
  """

  name: str = dataclasses.field(init=False)
  owner: Owner = dataclasses.field(init=False)
  request: Request
  sampling: SamplingRows
  limit: int
  stream: tokenizer_lib.TextStream | None = None
  reserves: bool = True
  logprobs: list[float] = dataclasses.field(default_factory=list)
  raw_logprobs: list[float] = dataclasses.field(default_factory=list)
  text: str = ""
  streamed: int = 0
  mask: Mask | None = None
  adapter: int = 0
  reading: ReadingState | None = None
  num_top: int = 0
  prompt_top: int | None = None
  prompt_scores: list[PromptScore] = dataclasses.field(default_factory=list)
  is_background: bool = False

  def __post_init__(self):
    self.name, self.owner = self.request.request_id, owner_lib.of(self.request)

  @property
  def num_prompt(self) -> int:
    """Number of tokens of the prompt."""
    return len(self.request.prompt)

  @property
  def num_generated(self) -> int:
    """Number of tokens of the response."""
    return len(self.tokens) - len(self.request.prompt)

  @property
  def is_prefilling(self) -> bool:
    """Whether positions of the prompt are still unwritten."""
    return self.num_written < self.num_prompt - 1 or not self.pages

  @property
  def needs_host(self) -> bool:
    """Whether the host has work to do between two tokens of the response."""
    sampling = self.request.sampling
    is_held = self.mask is not None or self.reading is not None or self.prompt_top is not None
    return bool(
      is_held
      or self.num_top
      or sampling.stop
      or sampling.allowed_token_ranges
      or sampling.has_penalties
    )

  @functools.cached_property
  def prompt_ids(self) -> np.ndarray:
    """The distinct tokens of the prompt, which penalties need at every step."""
    return penalties.distinct(self.request.prompt)

  @property
  def reusable(self) -> list[int]:
    """The tokens with reusable cached keys: all but the last, up to the first unscored one."""
    known = len(self.prompt_scores)
    is_scored = self.prompt_top is None or known >= self.num_prompt - 1
    return self.tokens[:-1] if is_scored else self.tokens[:known]

  @property
  def end(self) -> int:
    """Maximum tokens, prompt included, before it needs more pages, pauses or ends."""
    return min(self.limit, self.reach, *(window.reach for window in self.windows))

  def extend(self, chunk_tokens: int | None, reserved_tokens: int = 0) -> None:
    """Sets the limit to `chunk_tokens` more tokens of response; None is all up to max_tokens.

    A foreground request without chunks allocates pages as its response grows, unless
    `reserved_tokens` is 0.
    """
    most = self.num_prompt + self.request.sampling.max_tokens
    self.limit = most if chunk_tokens is None else min(most, len(self.tokens) + chunk_tokens)
    self.reserves = chunk_tokens is not None or self.is_background or not reserved_tokens

  def wanted_pages(self, config: EngineConfig) -> int:
    """Returns the number of pages, held ones included, after its next allocation."""
    tokens = self.limit
    if not self.reserves:
      tokens = sizes.next_tokens(config, len(self.tokens), self.limit)
    return sizes.pages_for(tokens, config.page_size)

  def expected_pages(self, config: EngineConfig) -> int:
    """Returns the number of pages, held ones included, that admission counts for it."""
    tokens = self.limit
    if not self.reserves:
      tokens = sizes.expected_tokens(config, len(self.tokens), self.limit)
    return sizes.pages_for(tokens, config.page_size)

  def completion(self, finish_reason: str, policy_version: int, error: str = "") -> Completion:
    """Returns the response so far."""
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
    """Drops the response's tokens after `num_tokens`, prompt included; the text is unchanged."""
    del self.tokens[num_tokens:]
    del self.logprobs[self.num_generated :], self.raw_logprobs[self.num_generated :]


class DraftPath(NamedTuple):
  """A root-to-leaf path of the draft tree that one step verifies.

  Rows are relative to the sequence's last token, the root, which is row 0; rows before it are
  non-draft positions of the same step.

  Attributes:
    tokens: the whole draft.
    page_row: i32[p], the pages that hold all of its keys after the step.
    rows: row of each token.
    num_shared: number of leading tokens that are computed as part of an earlier path; the other
      tokens are this path's own, in consecutive rows.
    copied: rows with keys to copy to this path's pages: non-draft rows that its own pages lack,
      and the rows of its shared tokens; their positions are consecutive.
    scratch: the pages of `page_row` that only this path uses; none for the first path, which is
      written to the sequence's pages.
    window_rows: i32[p] each, as `page_row`, for the further kinds of pages.
    window_scratch: the pages of `window_rows` that only this path uses.
  """

  tokens: tuple[int, ...]
  page_row: np.ndarray
  rows: tuple[int, ...]
  num_shared: int = 0
  copied: tuple[int, ...] = ()
  scratch: tuple[int, ...] = ()
  window_rows: tuple[np.ndarray, ...] = ()
  window_scratch: tuple[tuple[int, ...], ...] = ()


class ScheduledRows(NamedTuple):
  """The rows that one step computes for a sequence.

  From `first_row` on: `count` positions starting at the first unwritten one, then the tokens of the
  first path, then for each further path its own tokens.

  Attributes:
    sequence: the sequence.
    count: number of positions that are written permanently.
    first_row: index of the first row in the step.
    paths: paths of the draft tree; only if the rows reach the sequence's end.
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
    """Number of rows of the step."""
    return self.count + self.num_drafted if self.paths else self.count  # Hot: skip the sum.

  @property
  def num_samples(self) -> int:
    """Number of sampled rows: scored ones, the sequence's last position, and each drafted token."""
    own = 1 + self.num_drafted if self.paths else int(self.is_sampled)
    return own + self.num_scored

  @property
  def num_scored(self) -> int:
    """Number of rows after which the prompt's own next token is scored."""
    sequence = self.sequence
    if sequence.prompt_top is None:
      return 0
    end = min(sequence.num_written + self.count, sequence.num_prompt - 1)
    return max(end - len(sequence.prompt_scores), 0)

  @property
  def num_top(self) -> int | None:
    """Number of top tokens that its samples need; None if they need none and score no prompt."""
    sequence = self.sequence
    of_prompt = sequence.prompt_top if self.num_scored else None
    own = sequence.num_top if sequence.reading is None else sequence.reading.num_top
    return max(own, of_prompt or 0) if own and self.is_sampled else of_prompt

  @property
  def num_drafted(self) -> int:
    """Number of drafted tokens; shared ones count once."""
    return sum(len(path.tokens) - path.num_shared for path in self.paths)

  @property
  def num_copies(self) -> int:
    """Number of keys that are also written to a further path's pages."""
    return sum(len(path.copied) for path in self.paths)


class StepOutput(NamedTuple):
  """New output of one request in one visit.

  Attributes:
    request_id: id of the request.
    tokens: tokens sampled in this visit.
    text: text of these tokens; a possible prefix of a stop string is held back.
    finish_reason: why the request ended, "" if it did not.
    error: the error if `finish_reason` is "error" (see `Completion`).
    tops: for each token the top tokens under the processed distribution, if they were requested;
      without those that a filter excludes.
    prompt: scores of the prompt's tokens but the first, with the first token of the response, if
      they were requested; else None.
  """

  request_id: str
  tokens: tuple[int, ...]
  text: str
  finish_reason: str
  error: str = ""
  tops: tuple[TopLogprobs, ...] = ()
  prompt: tuple[PromptScore, ...] | None = None
