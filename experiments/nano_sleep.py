r"""Teaches nano to sleep: to leave true facts of a context, and to answer from them in few tokens.

Claim: a warm start of 1.5 million tokens teaches nano to leave true facts and to answer from them
in a third of the tokens; what reinforcement on the sleeper's verdict adds is measured in the end.
How `nano-sleep`, which this package ships, was made is on its card
(seerjax/models/nano_sleep/README.md), with its numbers.
Command: bash launch/local.sh experiments.nano_sleep --workdir=runs/nano_sleep
Hardware: 2 CPU cores, about half an hour. Results: the model's card, docs/results/sleep.md

  nano --documents below--> warm/model --GRPO (seerjax.rl) on the sleeper's verdict--> rl/model

| share | a document asks                     | and answers                                 |
|-------|-------------------------------------|---------------------------------------------|
| 0.55  | what does each have now?            | equations and facts: a sleeper's notes      |
| 0.12  | a question after the facts          | the last step, if there is one, the answer  |
| 0.06  | a question after context and facts  | the same                                    |
| 0.27  | a question after the context        | all steps, or the last 0, 1 or 2, as asked  |

All of it is of the split "train", which has neither the people nor the verbs nor the stories of the
split "test" (seerjax/tasks/stateful.py). --keeps_embeddings leaves the tokens' vectors as they are,
which nano cannot afford: those of its things are nearly one (a cosine of 0.97), since no answer of
it ever said which; notes then tell of any thing. Each part is kept in --workdir and not made again;
both trainings resume from their last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import math
import pathlib

from absl import app, flags, logging
import numpy as np

from experiments import pretrain_nano
from seerjax import checkpoint, rl
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import huggingface, loading, presets
from seerjax.rollout import groups
from seerjax.run import command_line, policy as policy_lib, presets as run_presets
from seerjax.run.config import RunConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.thinkers import Call, NoAnswer
from seerjax.tasks import stateful
from seerjax.tasks.draws import Draws
from seerjax.tasks.stateful import Sleeper, StatefulConfig, StatefulWordProblems
from seerjax.types import Problem, Verdict

# Shares of documents, in hundredths.
KINDS = {"sleep": 55, "wake": 12, "both": 6, "test": 27}
# Of a hundred questions, how many are asked at each length; see `stateful.LENGTHS`.
LENGTHS = {0: 10, 1: 12, 2: 13, None: 65}
LARGE_RATE = 0.3  # Of contexts with operands up to 99, as in nano's corpus.
LONG_RATE = 0.25  # Of contexts with four to eight events.
PLAIN = StatefulConfig(num_questions=4)
LARGE = dataclasses.replace(PLAIN, max_operand=99, max_total=400)


def steps_after(problem: Problem, notes: str) -> Problem:
  """Returns the problem with those steps of its solution alone that are not among notes."""
  *steps, answer = problem.solution.split("\n")
  known = set(notes.split("\n"))
  left = [step for step in steps if step not in known]
  return Problem(
    problem_id=problem.problem_id,
    prompt=problem.prompt,
    answer=problem.answer,
    context=problem.context,
    question=problem.question,
    solution="\n".join((*left, answer)),
  )


def documents(seed: int) -> Iterator[tuple[str, str]]:
  """Yields (prompt, answer) without end; equal seeds give equal texts."""
  draws = Draws("nano_sleep", seed)
  tasks = {
    (is_large, is_long): StatefulWordProblems(
      config=dataclasses.replace(
        LARGE if is_large else PLAIN, steps=(4, 8) if is_long else None
      )
    )
    for is_large in (False, True)
    for is_long in (False, True)
  }
  kinds = [kind for kind, share in KINDS.items() for _ in range(share)]
  lengths = [length for length, share in LENGTHS.items() for _ in range(share)]
  while True:
    task = tasks[draws.chance(LARGE_RATE), draws.chance(LONG_RATE)]
    contexts = task.contexts("train")
    place = draws.below(len(contexts))
    context, questions = contexts[place], task.questions("train", place)
    kind, problem = draws.choice(kinds), draws.choice(questions)
    length = draws.choice(lengths)
    if kind == "sleep":
      yield task.sleep_prompt(context), context.notes
      continue
    facts, text = (context.facts if kind != "test" else ""), context.text
    asked = stateful.with_length(problem.question, length)
    prompt = task.wake_prompt(asked, "" if kind == "wake" else text, facts)
    posed = steps_after(problem, context.notes) if facts else problem
    yield prompt, stateful.solution_of(posed, length)


def warm_start(start: str, directory: pathlib.Path, config: pretrain_nano.PretrainConfig) -> None:
  """Trains a model on `documents`, and writes `directory`/model; resumes what is there."""
  start = str(loading.directory_of(start))
  pretrain_nano.pretrain(config, presets.get("nano"), start, directory, documents(config.seed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lessons:
  """What reinforcement asks: three sleepers' prompts of four, and a question after the facts.

  Problem i of a split is of context i // 4.
  """

  stateful: StatefulWordProblems = StatefulWordProblems()
  name: str = "nano_sleep"

  def num_problems(self, split: str) -> int:
    """Returns four times as many as the split has contexts, of which three are one."""
    return 4 * len(self.stateful.contexts(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns a sleep prompt, or a question whose context is told by its facts alone."""
    place, number = divmod(index, 4)
    sleeper = Sleeper(stateful=self.stateful)
    if number < 3:
      return dataclasses.replace(sleeper.problem(split, place), problem_id=f"sleep-{split}-{index}")
    context = self.stateful.contexts(split)[place]
    problem = self.stateful.questions(split, place)[0]
    posed = steps_after(problem, context.notes)
    prompt = self.stateful.wake_prompt(problem.question, "", context.facts)
    return dataclasses.replace(posed, problem_id=f"wake-{split}-{index}", prompt=prompt)

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Judges notes by their facts, and an answer by its number."""
    if problem.problem_id.startswith("sleep-"):
      return Sleeper(stateful=self.stateful).verdict(problem, text)
    return self.stateful.verdict(problem, text)


def reinforcement(model: str, *, num_steps: int, seed: int) -> RunConfig:
  """Returns the main job's settings on `Lessons`, with notes' length in the place of answers'."""
  main_job = run_presets.main_job()
  return dataclasses.replace(
    main_job,
    model=model,
    task="experiments.nano_sleep:Lessons",
    seed=seed,
    num_steps=num_steps,
    num_instances=1,
    rollout=dataclasses.replace(main_job.rollout, groups_per_step=32, max_tokens=160),
    evaluation=EvaluationConfig(num_problems=512, temperature=1.0),
  )


def reinforce(config: RunConfig, directory: pathlib.Path) -> None:
  """Trains a model by GRPO, and writes `directory`/model; resumes what is there."""
  policy = policy_lib.load_policy(config.model, config.numerics)
  is_begun = checkpoint.latest_step(directory / "checkpoints") is not None
  say = functools.partial(print, flush=True)
  result = rl.train(config, policy, Lessons(), directory, resume=is_begun, log=say)
  huggingface.save(
    directory / "model",
    policy_lib.exported_weights(config.weights, policy, result.state.params),
    policy.model,
    tokenizer=policy.tokenizer,
  )


def right_facts(model: str, split: str, num_contexts: int, seed: int) -> np.ndarray:
  """Returns, of each context's facts, which share a sleeper states: f64[num_contexts].

  Sampled as in the rollouts, at temperature 1.
  """
  task = StatefulWordProblems()
  contexts = task.contexts(split)[:num_contexts]
  engine = Engine(
    loading.load_model(model), config=EngineConfig(page_size=16, max_sequences=64, max_context=512)
  )
  calls = [
    Call(
      messages=({"role": "user", "content": task.sleep_prompt(context)},),
      max_tokens=160,
      temperature=1.0,
      seed=groups.request_seed(seed, index),
    )
    for index, context in enumerate(contexts)
  ]
  found = np.zeros(len(contexts))
  for index, answer in EngineThinker(engine).ask(calls):
    if isinstance(answer, NoAnswer):
      raise answer
    verdict = task.sleep_verdict(contexts[index], answer.text)
    found[index] = verdict.num_true / verdict.num_wanted
  return found


def compare(warm: str, after: str, split: str, num_contexts: int, seed: int) -> str:
  """Returns one line: right facts before and after reinforcement, and the paired difference."""
  first, last = (right_facts(model, split, num_contexts, seed) for model in (warm, after))
  gain = 100 * (last - first)
  error = 1.96 * gain.std(ddof=1) / math.sqrt(len(gain))
  return (
    f"{split}: right facts at temperature 1, {len(gain)} contexts: {100 * first.mean():.1f} % warm,"
    f" {100 * last.mean():.1f} % reinforced, gain {gain.mean():.1f} ± {error:.1f} points (95 %)"
  )


def main(argv: list[str]) -> None:
  logging.set_verbosity(logging.WARNING)
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    directory = pathlib.Path(args.workdir)
    warm, last = directory / "warm", directory / "rl"
    if not (warm / "model").exists():
      config = pretrain_nano.PretrainConfig(
        num_tokens=args.num_tokens,
        tokens_per_batch=2048,
        learning_rate=args.learning_rate,
        keeps_embeddings=args.keeps_embeddings,
        seed=args.seed,
      )
      warm_start(args.start, warm, config)
    if not (last / "model").exists():
      config = reinforcement(str(warm / "model"), num_steps=args.num_steps, seed=args.seed)
      reinforce(config, last)
  for split in ("heldout", "test"):
    print(
      compare(str(warm / "model"), str(last / "model"), split, args.num_contexts, args.seed),
      flush=True,
    )
  print(f"wrote {last / 'model'}")


if __name__ == "__main__":
  flags.DEFINE_string("workdir", "runs/nano_sleep", "Checkpoints and models go here.")
  flags.DEFINE_string("start", "nano", "That the warm start begins with: a model of nano's shape.")
  flags.DEFINE_bool("keeps_embeddings", False, "Whether the tokens' vectors stay as they are.")
  flags.DEFINE_integer("num_tokens", 1_500_000, "Of the warm start, padding included.", 1)
  flags.DEFINE_float("learning_rate", 2e-3, "Peak of the warm start.")
  flags.DEFINE_integer("num_steps", 30, "Of reinforcement.", 1)
  flags.DEFINE_integer("num_contexts", 500, "Of each split, for the facts in the end.", 2)
  flags.DEFINE_integer("seed", 0, "Of documents and rollouts.")
  app.run(main)
