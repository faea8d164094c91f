"""Evaluates any model on any task, without a training run.

    model directory --Engine--> completions --task--> metrics of `evaluation.evaluate` per task

A run's own evaluations use the same problems and seeds, so a model that a run saved in float32 gets
the same metrics as in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from seerjax import fields, numerics as numerics_lib
from seerjax.engine import engine as engine_lib
from seerjax.models import chat_template, loading as model_loading
from seerjax.models.loading import Model
from seerjax.rollout import groups, policies
from seerjax.run import evaluation, policy as policy_lib, progress as progress_lib
from seerjax.tasks import loading
from seerjax.types import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
  """Configuration of one evaluation. Every field can be set as `--config.field` (nested: dots).

  Attributes:
    model: "nano", a Hugging Face directory (a run's is RUN/model), a GGUF file, or a Hub id.
    task: as in `RunConfig`.
    task_path: data file or directory of the task, if it needs one.
    task_options: as in `RunConfig`.
    seed: determines problems and samples.
    max_tokens: maximum number of generated tokens.
    stop: a completion ends before the first of these.
    reward_weights: as in `RolloutConfig`.
    numerics: all settings that determine bits.
    engine: sizes of the engine.
    chat: chat settings of every prompt.
    evaluation: number of problems and completions, and further sets.
  """

  model: str = "nano"
  task: str = "word_problems"
  task_path: str = ""
  task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  seed: int = 0
  max_tokens: int = 256
  stop: tuple[str, ...] = ()
  reward_weights: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
  numerics: numerics_lib.NumericsConfig = numerics_lib.NumericsConfig()
  engine: engine_lib.EngineConfig = engine_lib.EngineConfig()
  chat: chat_template.ChatConfig = chat_template.ChatConfig()
  evaluation: evaluation.EvaluationConfig = evaluation.EvaluationConfig()

  def __post_init__(self):
    fields.check(self, seed=fields.SEED)
    if self.max_tokens > self.engine.max_model_len - 1:
      raise ValueError(
        f"EvaluateConfig.max_tokens: got {self.max_tokens}, expected at most"
        f" {self.engine.max_model_len - 1}, because prompt and answer must fit"
        f" EngineConfig.max_model_len={self.engine.max_model_len}; lower it, or raise that."
      )
    self.answers()  # Validates its fields.

  def answers(self) -> groups.RolloutConfig:
    """Returns the limits of completions, as in a run's config."""
    return groups.RolloutConfig(
      max_tokens=self.max_tokens,
      stop=self.stop,
      reward_weights=self.reward_weights,
    )


def evaluate_model(
  config: EvaluateConfig,
  *,
  model: Model | None = None,
  task: Task | None = None,
  sets: Mapping[str, Task] | None = None,
  log: Callable[[str], None] = print,
) -> dict[str, dict[str, float]]:
  """Evaluates a model on a task and on further sets.

  Args:
    config: the evaluation.
    model: model from `seerjax.load_model`; overrides `config.model`.
    task: overrides `config.task`.
    sets: further tasks by name, in addition to `config.evaluation.sets`.
    log: receives progress lines, at least one every ten seconds.

  Returns:
    The metrics of `evaluation.evaluate` by task: "heldout" for the task itself, "heldout_NAME" for
    a set NAME.

  Raises:
    ValueError: for an invalid model, task or prompt, before sampling starts; later for a text that
      a task cannot judge.
    FileNotFoundError: if the model or a task's file does not exist.
  """
  if task is None:
    task = loading.load(config.task, path=config.task_path or None, options=config.task_options)
  further = evaluation.load_sets(config.evaluation, sets)
  with progress_lib.Progress(log) as progress:
    with progress.phase("reading the model"):
      model = model_loading.load_model(config.model, config.numerics) if model is None else model
    if model.tokenizer is None:
      raise ValueError(
        "evaluate_model.model: got a model without a tokenizer, expected one, because prompts and"
        " answers are text; load it with seerjax.load_model."
      )
    tokenizer = policy_lib.chatting(model.tokenizer, config.chat)
    tasks = evaluation.tasks_by_room(task, further)
    evaluation.check_prompts(
      config.evaluation, tasks.values(), tokenizer=tokenizer, max_tokens=config.max_tokens,
      context=min(config.engine.max_model_len, model.config.max_model_len), seed=config.seed,
    )  # fmt: skip
    engine = engine_lib.Engine(
      dataclasses.replace(model, tokenizer=tokenizer),
      config=config.engine,
      key=numerics_lib.key(config.seed),
    )
    asked = evaluation.Evaluator(
      config.evaluation, engine, tasks, config.answers(),
      policies.LongestGroupFirst(chunk_tokens=128), config.seed, progress,
    )  # fmt: skip
    found: dict[str, dict[str, float]] = {}
    for room, one in tasks.items():
      found[room] = asked.accuracy(room)
      progress.say(f"{room} ({one.name}): {evaluation.describe(found[room])}")
  return found
