r"""Teaches nano to sleep: to leave true facts of a context, and to answer from them in few tokens.

Claim: a warm start teaches nano to leave true facts and to answer from them in a third of the
tokens; what reinforcement on the sleeper's verdict adds is measured in the end.
How `nano-sleep`, which this package ships, was made is on its card
(seerjax/models/nano_sleep/README.md), with its numbers.
Command: bash launch/local.sh experiments.nano_sleep --workdir=runs/nano_sleep
Hardware: 2 CPU cores, about an hour. Results: the model's card, docs/results/sleep.md

  nano --documents below--> warm/model --GRPO (seerjax.rl) on the sleeper's verdict--> rl/model

| share | a document asks                     | and answers                                 |
|-------|-------------------------------------|---------------------------------------------|
| 0.50  | what does each have now?            | equations and facts: a sleeper's notes      |
| 0.20  | a question after the facts          | the last step, if there is one, the answer  |
| 0.03  | a question after context and facts  | the same                                    |
| 0.27  | a question after the context        | all steps, or the last 0, 1 or 2, as asked  |

All of it is of the split "train", which has neither the people nor the verbs nor the stories of the
split "test" (seerjax/tasks/stateful.py). In each document people have other names, about half of
them invented: who learns from so many can only copy. Three people of the training split are in no
document, which shows on "heldout" whether copying was learnt. Some stories are "branches", where
each is compared with anybody before, and some sentences have another adverb or none.

The vectors of nano's things are nearly one (a cosine of 0.97), since no answer of it ever said
which: the warm start begins by spreading them, or --keeps_embeddings leaves all vectors as they
are. Each part is kept in --workdir and not made again; both trainings resume from their last
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import math
import pathlib
import re

from absl import app, flags, logging
import jax.numpy as jnp
import numpy as np

from experiments import pretrain_nano
from seerjax import checkpoint, rl
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import huggingface, loading, presets, tokenizer as tokenizer_lib
from seerjax.rollout import groups
from seerjax.run import command_line, policy as policy_lib, presets as run_presets
from seerjax.run.config import RunConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.thinkers import Call, NoAnswer
from seerjax.tasks import stateful, stories
from seerjax.tasks.draws import Draws
from seerjax.tasks.stateful import Sleeper, StatefulConfig, StatefulWordProblems
from seerjax.types import Problem, Verdict

# Shares of documents, in hundredths.
KINDS = {"sleep": 50, "wake": 20, "both": 3, "test": 27}
# People of the split "train" whom no document tells of by this name: a probe of copying that leaves
# the split "test" unread. Heldout contexts tell of them.
PROBE_NAMES = ("Kim", "Mia", "Omar")
LEARNT_NAMES = tuple(name for name in stateful.TRAIN_NAMES if name not in PROBE_NAMES)
# Invented names begin as people's names do, those of the probe and of the split "test" too, and go
# on with an ending. Nano's tokenizer has a token for each part: to write "Tomora" is to copy "Tom"
# and "ora".
BEGINNINGS = (*stories.NAMES, "A", "E", "I", "L", "M", "N", "T")
ENDINGS = (
  "a", "an", "ar", "as", "da", "el", "en", "er", "es", "i", "ia", "im", "in", "ir", "na", "o", "or",
  "ora", "os", "th", "va", "y",
)  # fmt: skip
KNOWN_RATE = 0.6
# Of a hundred questions, how many are asked at each length; see `stateful.LENGTHS`.
LENGTHS = {0: 10, 1: 12, 2: 13, None: 65}
BRANCH_RATE = 0.12  # Of contexts in which each is compared with anybody before.
VARIED_RATE = 0.2  # Of sentences that get another adverb, or lose theirs.
LARGE_RATE = 0.3  # Of contexts with operands up to 99, as in nano's corpus.
LONG_RATE = 0.1  # Of contexts with four to eight events.
PLAIN = StatefulConfig(num_questions=4)
LARGE = dataclasses.replace(PLAIN, max_operand=99, max_total=400)
ADVERB = re.compile(r"(Then|Later|Now|At first|In the end,) ")
# Sentences that belong to "test", or to "heldout" of nano's own task.
UNTOLD = re.compile(
  "|".join(
    re.sub(r"\\\{([a-z])\\\}", lambda found: {"n": r"\d+", "k": r"\d+"}.get(found[1], r"\w+"), form)
    for forms in (stateful.FORMS["test"], stories.HELDOUT_FORMS)
    for form in map(re.escape, (form for several in forms.values() for form in several))
  )
)


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


def new_names(draws: Draws, count: int) -> tuple[str, ...]:
  """Returns different names for people of a document, known and invented.

  Args:
    draws: that decide.
    count: of names, at most as many as there are `BEGINNINGS`.
  """
  found: list[str] = []
  for beginning in draws.sample(BEGINNINGS, count):
    if draws.chance(KNOWN_RATE):
      left = [name for name in LEARNT_NAMES if name not in found and name != beginning]
      if left:
        found.append(draws.choice(left))
        continue
    endings = [ending for ending in ENDINGS if beginning + ending not in stories.NAMES]
    found.append(beginning + draws.choice(endings))
  return tuple(found)


def new_people(draws: Draws) -> dict[str, str]:
  """Returns a drawn name for everybody of the split "train"."""
  people = stateful.TRAIN_NAMES
  return dict(zip(people, new_names(draws, len(people)), strict=True))


def renamed(text: str, names: Mapping[str, str]) -> str:
  """Returns a text with every name for which another is given in its place."""
  return re.sub(r"\b[A-Z][a-z]+\b", lambda found: names.get(found[0], found[0]), text)


def varied(text: str, draws: Draws) -> str:
  """Returns a text in which some sentences have another adverb or none, and mean the same.

  No sentence of the split "test" comes about.
  """

  def vary(sentence: str) -> str:
    if not draws.chance(VARIED_RATE):
      return sentence
    if found := ADVERB.match(sentence):
      other = sentence[found.end() :]
      other = other[0].upper() + other[1:]
    else:
      is_state = re.search(r" (has|starts|is|have) ", sentence) is not None
      adverb = draws.choice(
        ("Now", "In the end,")
        if sentence.startswith("How many")
        else ("At first",) if is_state else ("Then", "Later")
      )
      is_word = sentence.startswith(("A friend", "Each day", "For ", "How ", "If "))
      other = f"{adverb} {sentence[0].lower() if is_word else sentence[0]}{sentence[1:]}"
    return sentence if UNTOLD.fullmatch(other) else other

  return " ".join(map(vary, re.split(r"(?<=[.?]) ", text)))


def documents(seed: int) -> Iterator[tuple[str, str]]:
  """Yields (prompt, answer) without end; equal seeds give equal texts."""
  draws = Draws("nano_sleep", seed)
  tasks = {
    (is_large, is_long, is_branch): StatefulWordProblems(
      config=dataclasses.replace(
        LARGE if is_large else PLAIN,
        steps=(2, 5) if is_branch else (4, 8) if is_long else None,
        kinds=("branch",) if is_branch else (),
      )
    )
    for is_large in (False, True)
    for is_long in (False, True)
    for is_branch in (False, True)
  }
  kinds = [kind for kind, share in KINDS.items() for _ in range(share)]
  lengths = [length for length, share in LENGTHS.items() for _ in range(share)]
  while True:
    task = tasks[
      draws.chance(LARGE_RATE), draws.chance(LONG_RATE), draws.chance(BRANCH_RATE)
    ]
    contexts = task.contexts("train")
    place = draws.below(len(contexts))
    context, questions = contexts[place], task.questions("train", place)
    kind, problem = draws.choice(kinds), draws.choice(questions)
    length = draws.choice(lengths)
    names = new_people(draws)
    if kind == "sleep":
      told = dataclasses.replace(context, text=varied(context.text, draws))
      yield renamed(task.sleep_prompt(told), names), renamed(context.notes, names)
      continue
    facts, text = (context.facts if kind != "test" else ""), varied(context.text, draws)
    asked = stateful.with_length(varied(problem.question, draws), length)
    prompt = task.wake_prompt(asked, "" if kind == "wake" else text, facts)
    posed = steps_after(problem, context.notes) if facts else problem
    yield renamed(prompt, names), stateful.solution_of(posed, length)


def spread(start: str, directory: pathlib.Path, seed: int) -> None:
  """Writes a model like `start` whose vectors of things and of names' parts can be told apart.

  Those of things are nearly one in nano, and those of most endings were never trained. Each gets a
  drawn direction of length 1, and what it has beyond length 1 is taken off.
  """
  numerics = pretrain_nano.numerics_for(pretrain_nano.LENGTHS[0])
  params, model = huggingface.load(start, numerics)
  words = tokenizer_lib.load(loading.path_of("nano"))
  tokens = {
    token
    for word in (*(f" {thing}" for thing in stories.OBJECTS), *ENDINGS, *BEGINNINGS[-7:])
    for token in words.encode(word)
  }
  chosen = np.array(sorted(tokens))
  embed = np.array(params["embed"], np.float32)
  drawn = np.random.default_rng(seed).standard_normal((len(chosen), embed.shape[1]))
  drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
  lengths = np.linalg.norm(embed[chosen], axis=1, keepdims=True)
  embed[chosen] = embed[chosen] / np.maximum(lengths, 1.0) + drawn
  spread_params = {**params, "embed": jnp.asarray(embed, params["embed"].dtype)}
  huggingface.save(directory, spread_params, model, dtype="bfloat16", tokenizer=words)


def warm_start(start: str, directory: pathlib.Path, config: pretrain_nano.PretrainConfig) -> None:
  """Trains a model on `documents`, and writes `directory`/model; resumes what is there."""
  start = str(loading.path_of(start))
  if not config.keeps_embeddings:
    if not (directory / "spread").exists():
      spread(start, directory / "spread", config.seed)
    start = str(directory / "spread")
  pretrain_nano.pretrain(config, presets.get("nano"), start, directory, documents(config.seed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lessons:
  """What reinforcement asks: three sleepers' prompts of four, and a question after the facts.

  Problem i of a split is of context i // 4. In "train" each problem tells of people whose names are
  drawn for it, as in `documents`.
  """

  stateful: StatefulWordProblems = StatefulWordProblems()
  name: str = "nano_sleep"

  def num_problems(self, split: str) -> int:
    """Returns four times as many as the split has contexts, of which three are one."""
    return 4 * len(self.stateful.contexts(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns a sleep prompt, or a question whose context is told by its facts alone."""
    place, number = divmod(index, 4)
    names = new_people(Draws(self.name, split, index)) if split == "train" else {}
    if number < 3:
      problem_id = f"sleep-{split}-{index}"
      found = Sleeper(stateful=self.stateful).problem(split, place)
      prompt = found.prompt
    else:
      problem_id = f"wake-{split}-{index}"
      context = self.stateful.contexts(split)[place]
      problem = self.stateful.questions(split, place)[0]
      found = steps_after(problem, context.notes)
      prompt = self.stateful.wake_prompt(problem.question, "", context.facts)
    return dataclasses.replace(
      found,
      problem_id=problem_id,
      prompt=renamed(prompt, names),
      context=renamed(found.context, names),
      question=renamed(found.question, names),
      answer=renamed(found.answer, names),
      solution=renamed(found.solution, names),
    )

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


def stated(
  model: str, split: str, num_contexts: int, seed: int, temperature: float = 1.0
) -> list[dict[str, bool]]:
  """Returns, of each context, whether a sleeper states each person's fact.

  Args:
    model: of the sleeper.
    split: of the contexts.
    num_contexts: the split's first ones.
    seed: of what is sampled.
    temperature: 1 is that of the rollouts.
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
      temperature=temperature,
      seed=groups.request_seed(seed, index),
    )
    for index, context in enumerate(contexts)
  ]
  found: list[dict[str, bool]] = [{} for _ in contexts]
  for index, answer in EngineThinker(engine).ask(calls):
    if isinstance(answer, NoAnswer):
      raise answer
    said = stateful.facts_in(answer.text)
    wanted = stateful.facts_in(contexts[index].facts)
    found[index] = {fact.split()[0]: fact in said for fact in wanted}
  return found


def right_facts(found: Sequence[Mapping[str, bool]]) -> np.ndarray:
  """Returns which share of each context's facts a sleeper states: f64[contexts]."""
  return np.array([np.mean([*facts.values()]) for facts in found])


def compare(warm: str, after: str, split: str, num_contexts: int, seed: int) -> str:
  """Returns one line: right facts before and after reinforcement, and the paired difference."""
  found = [stated(model, split, num_contexts, seed) for model in (warm, after)]
  first, last = map(right_facts, found)
  gain = 100 * (last - first)
  error = 1.96 * gain.std(ddof=1) / math.sqrt(len(gain))
  probe = [
    right
    for facts in found[1]
    for person, right in facts.items()
    if person not in LEARNT_NAMES
  ]
  return (
    f"{split}: right facts at temperature 1, {len(gain)} contexts: {100 * first.mean():.1f} % warm,"
    f" {100 * last.mean():.1f} % reinforced, gain {gain.mean():.1f} ± {error:.1f} points (95 %);"
    f" {100 * np.mean(probe):.1f} % of the {len(probe)} of people without documents"
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
        tokens_per_batch=1024,
        learning_rate=args.learning_rate,
        prompt_weight=0.0,
        keeps_embeddings=args.keeps_embeddings,
        keeps_unseen=True,
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
  flags.DEFINE_integer("num_tokens", 2_000_000, "Of the warm start, padding included.", 1)
  flags.DEFINE_float("learning_rate", 1.2e-3, "Peak of the warm start.")
  flags.DEFINE_integer("num_steps", 30, "Of reinforcement.", 1)
  flags.DEFINE_integer("num_contexts", 300, "Of each split, for the facts in the end.", 2)
  flags.DEFINE_integer("seed", 0, "Of documents and rollouts.")
  app.run(main)
