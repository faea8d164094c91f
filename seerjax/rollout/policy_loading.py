"""Loads a scheduling policy by name: "my_module:MyPolicy", a class without required settings, or
"my_module:POLICY", a policy with its settings.
"""

from __future__ import annotations

from seerjax.rollout.policies import Policy
from seerjax.tasks import loading


def load(scheduler: Policy | str) -> Policy:
  """Returns the policy that a config has or names.

  Raises:
    ValueError: if there is no such policy.
  """
  if isinstance(scheduler, Policy):
    return scheduler
  found = loading.imported(
    scheduler, caller="scheduler", example="my_module:MyPolicy", expected="a scheduling policy"
  )
  if isinstance(found, type):
    try:
      found = found()
    except (Exception, SystemExit) as error:
      raise ValueError(
        f"scheduler: got {type(error).__name__} ({error}) from {scheduler!r} without arguments,"
        " expected a policy; give its settings defaults, or name a policy that has them."
      ) from error
  if not isinstance(found, Policy):
    raise ValueError(
      f"scheduler: got {scheduler!r}, a {type(found).__name__}, expected a scheduling policy; make"
      " it a subclass of seerjax.rollout.policies.Policy."
    )
  return found


def check_name(scheduler: Policy | str, what: str) -> None:
  """Refuses a name that `load` cannot parse; `what` is the prefix of the message.

  Raises:
    ValueError: for a name that is not "module:Policy".
  """
  if isinstance(scheduler, Policy):
    return
  module, _, name = scheduler.partition(":")
  if not module or not name.isidentifier():
    raise ValueError(
      f"{what}: got {scheduler!r}, expected 'my_module:MyPolicy'; leave it out for"
      " LongestGroupFirst."
    )
