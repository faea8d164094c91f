"""What the engine asks before each step: how may these requests go on?

  drafts = drafter.draft(queries)    one list of paths a query; [] drafts nothing
  ... the engine verifies by own samples and says what came of it ...
  drafter.observe(request_id, group_id, new_tokens, num_drafted, num_accepted, is_finished)

The engine knows a protocol of these two methods and nothing from here. No draft can change what is
said (DESIGN: the contract), only how many steps it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# Of one query: alternative continuations, the main one first, each as its tokens.
Paths = Sequence[tuple[int, ...]]


class Query(Protocol):
  """What is asked of one request in one step; the engine's record has these fields.

  Attributes:
    request_id: of the request.
    group_id: requests of one group share their drafts' source; "" if it has no group.
    tokens: prompt and answer so far. The drafter neither changes nor keeps it.
    num_prompt: how many of them are the prompt.
    max_draft: most tokens that may be drafted, all paths together; 0 asks for none.
  """

  @property
  def request_id(self) -> str: ...
  @property
  def group_id(self) -> str: ...
  @property
  def tokens(self) -> Sequence[int]: ...
  @property
  def num_prompt(self) -> int: ...
  @property
  def max_draft(self) -> int: ...
