r"""Measures rewrites, and answers made in advance, as drafts for questions about their context.

Claim: both raise the tokens per verification step, and no bit of an answer differs.
Command: bash launch/local.sh experiments.sleep_drafts
Hardware: any; tokens and steps are counted, no clock is read. Results: docs/results/sleep_engine.md

A runner sleeps for contexts of `StatefulWordProblems`; then each question is answered alone, from
the rewrite: without drafts from sleep, with the rewrite in the suffix tree of its context's
questions, and with answers to likely questions in it too. In all arms a question drafts from its
own prompt (which contains the rewrite) and answer, and from earlier questions of its context:
`--num_questions=1` asks one question per context, which has no earlier ones.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import NamedTuple

from absl import app, flags

import seerjax
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models.loading import Model
from seerjax.run import command_line
from seerjax.sleep import prompts as prompts_lib, runner as runner_lib
from seerjax.sleep.contexts import Contexts, Identity
from seerjax.sleep.planner import PlannerConfig
from seerjax.sleep.runner import Runner, RunnerConfig
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.tasks.stateful import StatefulWordProblems
from seerjax.types import Request, SamplingParams

SPACE = "experiment"
# By arm: whether rewrites are used as drafts, and how many likely questions are answered.
ARMS = {"none from sleep": (False, 0), "rewrites": (True, 0), "rewrites and answers": (True, 8)}


class Count(NamedTuple):
  """Counts over the questions of an arm.

  Attributes:
    questions: number of questions.
    tokens: tokens of their answers.
    steps: steps in which these were sampled.
    drafted: verified draft tokens.
    accepted: accepted draft tokens.
    answers: by question, tokens and log-probabilities.
  """

  questions: int
  tokens: int
  steps: int
  drafted: int
  accepted: int
  answers: tuple[tuple[tuple[int, ...], bytes], ...]

  @property
  def acceptance(self) -> float:
    """Returns tokens per step, the bonus token included."""
    return self.tokens / self.steps


class Silent(Runner):
  """A runner that does not use rewrites as drafts."""

  def _seed_drafts(self, context, job, notes):
    pass


def ask(
  model: Model,
  *,
  arm: str,
  num_contexts: int,
  num_questions: int,
  split: str,
  config: EngineConfig,
  max_tokens: int,
  verbosity: int,
  temperature: float,
) -> Count:
  """Returns the counts of the first contexts' questions in one arm.

  Args:
    model: the model, with a tokenizer.
    arm: a key of `ARMS`.
    num_contexts: how many contexts of the split.
    num_questions: how many questions per context, from the first on.
    split: split of the task.
    config: configuration of the engine, with one step per call so that every step may draft.
    max_tokens: maximum tokens of a rewrite and of an answer.
    verbosity: verbosity of answers.
    temperature: temperature of answers.
  """
  has_rewrites, num_anticipated = ARMS[arm]
  task = StatefulWordProblems()
  asked = prompts_lib.taught(task)
  engine = Engine(model, config=config, drafter=SuffixDrafter(budget=None))
  identity = Identity(weights="w", tokenizer="t", template="c")
  totals, answers = [0] * 5, []
  with (
    tempfile.TemporaryDirectory() as directory,
    Contexts(directory, identity=identity) as registry,
  ):
    runner = (Runner if has_rewrites else Silent)(
      engine,
      registry,
      asked,
      config=RunnerConfig(
        max_rethinks=1,
        sleep_tokens=max_tokens,
        num_anticipated=num_anticipated,
        answer_tokens=max_tokens,
        verbosity=verbosity,
      ),
      planner_config=PlannerConfig(num_trials=10**9),  # Sleeps for every context.
    )
    assert model.tokenizer is not None
    for number, told in enumerate(task.contexts(split)[:num_contexts]):
      ids = model.tokenizer.encode(told.text, special_tokens_as_text=True)
      registry.register(SPACE, str(number), told.text, ids, step=number)
      runner_lib.sleep_to_end(runner, engine, [SPACE], step=number)
      context = registry.get(SPACE, str(number), step=number)
      rewrites = registry.rewrites(SPACE, str(number), step=number)
      notes = asked.joined([one.text for one in rewrites])
      for place, problem in enumerate(task.questions(split, number)[:num_questions]):
        text = "" if notes else told.text
        prompt = model.tokenizer.chat_ids([*asked.wake(problem.question, text, notes, verbosity)])
        request = Request(
          request_id=f"{number}/{place}",
          prompt=tuple(prompt),
          sampling=SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            stop_token_ids=model.tokenizer.eos_ids,
          ),
          seed=place,
          group_id=runner_lib.group_of(context),
          namespace=SPACE,
        )
        before = dataclasses.replace(engine.counters)
        engine.submit(request)
        steps = 0
        while engine.num_unfinished:
          steps += any(update.tokens for update in engine.step())
        (completion,) = engine.poll()
        now = engine.counters
        found = (
          1, len(completion.tokens), steps, now.drafted_tokens - before.drafted_tokens,
          now.accepted_tokens - before.accepted_tokens,
        )  # fmt: skip
        totals = [total + one for total, one in zip(totals, found, strict=True)]
        answers.append((completion.tokens, completion.behaviour_logprobs.tobytes()))
  questions, said, steps, drafted, accepted = totals
  return Count(questions, said, steps, drafted, accepted, tuple(answers))


def line(arm: str, count: Count) -> str:
  """Returns one line of the table."""
  return (
    f"| {arm} | {count.questions} | {count.tokens} | {count.steps} | {count.drafted} |"
    f" {count.accepted} | {count.acceptance:.2f} |"
  )


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    for name in ("num_contexts", "num_questions"):
      if getattr(args, name) < 1:
        raise ValueError(f"--{name}: got {getattr(args, name)}, expected at least 1; raise it.")
    model = seerjax.load_model(args.model)
    config = EngineConfig(max_context=args.max_context, max_sequences=8, steps_per_visit=1)
    print("| drafts | questions | tokens | steps | drafted | accepted | tokens per step |")
    print("|---|---|---|---|---|---|---|")
    first = None
    for arm in ARMS:
      count = ask(
        model,
        arm=arm,
        num_contexts=args.num_contexts,
        num_questions=args.num_questions,
        split=args.split,
        config=config,
        max_tokens=args.max_tokens,
        verbosity=args.answer_length,
        temperature=args.temperature,
      )
      first = first or count
      assert count.answers == first.answers, "drafts changed an answer"
      print(line(arm, count), flush=True)


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string(
    "model", "nano-sleep", "Model: nano-sleep, a directory, a GGUF file or a Hub id."
  )
  flags.DEFINE_integer("num_contexts", 20, "Number of contexts to sleep for.")
  flags.DEFINE_integer("num_questions", 10, "Number of questions per context, at most ten.")
  flags.DEFINE_integer("answer_length", 1, "Answer length from 0 (shortest) to 3.")
  flags.DEFINE_string("split", "heldout", "Split of the task: train, heldout or test.")
  flags.DEFINE_integer("max_context", 512, "Maximum tokens of a prompt plus its response.")
  flags.DEFINE_integer("max_tokens", 96, "Maximum tokens of a rewrite, and of a response.")
  flags.DEFINE_float("temperature", 0.0, "Sampling temperature of responses; 0 is greedy.")


if __name__ == "__main__":
  define_flags()
  app.run(main)
