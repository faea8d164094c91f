r"""Trains nano for sleep-time compute: to write true facts of a context and to answer from them.

Claim: a warm start teaches nano to write true facts and to answer from them in a third of the
tokens; the effect of reinforcement learning on the sleeper's verdict is measured at the end.
The model card (seerjax/models/nano_sleep/README.md) documents how `nano-sleep` was made,
and its numbers.
Command: bash launch/local.sh experiments.sleep.train_nano --workdir=runs/nano_sleep
Hardware: 2 CPU cores, about an hour. Results: the model's card, docs/results/sleep.md

  nano --documents below--> warm/model --GRPO (seerjax.rl) on the sleeper's verdict--> rl/model

| share | prompt                              | answer                                      |
|-------|-------------------------------------|---------------------------------------------|
| 0.50  | what does each have now?            | equations and facts: a sleeper's notes      |
| 0.20  | a question after the facts          | the last step, if there is one, the answer  |
| 0.03  | a question after context and facts  | the same                                    |
| 0.27  | a question after the context        | all steps, or the last 0, 1 or 2, as asked  |

All documents are of the split "train", which has none of the people, verbs and stories of the split
"test" (seerjax/tasks/stateful.py). In each document people get new names, about half of them
invented, so that the model has to learn to copy names. Three people of the training split appear in
no document; results for them on "heldout" show whether copying was learnt. Some stories are
"branches", where each person is compared with any earlier one, and in some sentences the adverb is
changed or dropped.

nano's embeddings of things are nearly equal (a cosine of 0.97), because its answers never name
them: the warm start first spreads them, unless --keeps_embeddings leaves all embeddings as they
are. Each part is kept in --workdir and reused; both trainings resume from their last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import pathlib
import re

from absl import flags, logging
import jax.numpy as jnp
import numpy as np

from experiments import measure
from experiments.learning import pretrain_nano
from seerjax import checkpoint, rl
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models import huggingface, loading, presets, tokenizer as tokenizer_lib
from seerjax.rollout import groups
from seerjax.run import policy as policy_lib, presets as run_presets
from seerjax.run.config import RunConfig
from seerjax.run.evaluation import EvaluationConfig
from seerjax.sleep.engine_thinker import EngineThinker
from seerjax.sleep.thinkers import Call, NoAnswer
from seerjax.tasks import stateful, stories
from seerjax.tasks.draws import Draws
from seerjax.tasks.stateful import Sleeper, StatefulConfig, StatefulWordProblems
from seerjax.types import Problem, Verdict

# Shares of documents, in percent.
KINDS = {"sleep": 50, "wake": 20, "both": 3, "test": 27}
# Names of the split "train" that occur in no document but in heldout contexts: they test copying
# without using the split "test".
PROBE_NAMES = ("Kim", "Mia", "Omar")
LEARNT_NAMES = tuple(name for name in stateful.TRAIN_NAMES if name not in PROBE_NAMES)
# Invented names start like existing names, including those of the probe and of the split "test",
# and get an ending. Nano's tokenizer has a token for each part: "Tomora" is "Tom" and "ora".
BEGINNINGS = (*stories.NAMES, "A", "E", "I", "L", "M", "N", "T")
ENDINGS = (
  "a", "an", "ar", "as", "da", "el", "en", "er", "es", "i", "ia", "im", "in", "ir", "na", "o", "or",
  "ora", "os", "th", "va", "y",
)  # fmt: skip
KNOWN_RATE = 0.6
# Percent of questions by requested length; see `stateful.LENGTHS`.
LENGTHS = {0: 10, 1: 12, 2: 13, None: 65}
BRANCH_RATE = 0.12  # Contexts in which each person is compared with any earlier one.
VARIED_RATE = 0.2  # Sentences with an adverb added, changed or dropped.
LARGE_RATE = 0.3  # Contexts with operands up to 99, as in nano's corpus.
LONG_RATE = 0.1  # Contexts with four to eight events.
PLAIN = StatefulConfig(num_questions=4)
LARGE = dataclasses.replace(PLAIN, max_operand=99, max_total=400)
ADVERB = re.compile(r"(Then|Later|Now|At first|In the end,) ")
# Sentences reserved for "test", or for "heldout" of nano's own task.
UNTOLD = re.compile(
  "|".join(
    re.sub(r"\\\{([a-z])\\\}", lambda found: {"n": r"\d+", "k": r"\d+"}.get(found[1], r"\w+"), form)
    for forms in (stateful.FORMS["test"], stories.HELDOUT_FORMS)
    for form in map(re.escape, (form for several in forms.values() for form in several))
  )
)


def steps_after(problem: Problem, notes: str) -> Problem:
  """Returns the problem with only those steps of its solution that are not in the notes."""
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
  """Returns distinct names for the people of a document, known and invented.

  Args:
    draws: source of random numbers.
    count: number of names, at most `len(BEGINNINGS)`.
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
  """Returns a new name for each person of the split "train"."""
  people = stateful.TRAIN_NAMES
  return dict(zip(people, new_names(draws, len(people)), strict=True))


def renamed(text: str, names: Mapping[str, str]) -> str:
  """Returns the text with names replaced according to `names`."""
  return re.sub(r"\b[A-Z][a-z]+\b", lambda found: names.get(found[0], found[0]), text)


def varied(text: str, draws: Draws) -> str:
  """Returns the text with adverbs added, changed or dropped in some sentences; its meaning stays.

  It never creates a sentence of the split "test".
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
        else ("At first",)
        if is_state
        else ("Then", "Later")
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
    task = tasks[draws.chance(LARGE_RATE), draws.chance(LONG_RATE), draws.chance(BRANCH_RATE)]
    contexts = task.contexts("train")
    place = draws.below(len(contexts))
    context, questions = contexts[place], task.questions("train", place)
    kind, problem = draws.choice(kinds), draws.choice(questions)
    length = draws.choice(lengths)
    names = new_people(draws)
    if kind == "sleep":
      shown = dataclasses.replace(context, text=varied(context.text, draws))
      yield renamed(task.sleep_prompt(shown), names), renamed(context.notes, names)
      continue
    facts, text = (context.facts if kind != "test" else ""), varied(context.text, draws)
    asked = stateful.with_length(varied(problem.question, draws), length)
    prompt = task.wake_prompt(asked, "" if kind == "wake" else text, facts)
    posed = steps_after(problem, context.notes) if facts else problem
    yield renamed(prompt, names), stateful.solution_of(posed, length)


def spread(start: str, directory: pathlib.Path, seed: int) -> None:
  """Writes a copy of the model `start` with distinguishable embeddings of things and name parts.

  In nano the embeddings of things are nearly equal, and those of most endings were never trained.
  Each is scaled to length 1 if it is longer, and a random direction of length 1 is added.
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
  """Trains a model on `documents` and writes `directory`/model; resumes an earlier call."""
  start = str(loading.path_of(start))
  if not config.keeps_embeddings:
    if not (directory / "spread").exists():
      spread(start, directory / "spread", config.seed)
    start = str(directory / "spread")
  pretrain_nano.pretrain(config, presets.get("nano"), start, directory, documents(config.seed))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lessons:
  """The task of reinforcement learning: three sleep prompts and one question per context.

  Problem i of a split belongs to context i // 4; its question follows the context's facts.
  In "train" each problem has newly drawn names, as in `documents`.
  """

  stateful: StatefulWordProblems = StatefulWordProblems()
  name: str = "nano_sleep"

  def num_problems(self, split: str) -> int:
    """Returns four problems per context; three of them are the same sleep prompt."""
    return 4 * len(self.stateful.contexts(split))

  def problem(self, split: str, index: int) -> Problem:
    """Returns a sleep prompt, or a question that is given the facts instead of the context."""
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
    """Returns the verdict: notes are judged by their facts, answers by their number."""
    if problem.problem_id.startswith("sleep-"):
      return Sleeper(stateful=self.stateful).verdict(problem, text)
    return self.stateful.verdict(problem, text)


def reinforcement(model: str, *, num_steps: int, seed: int) -> RunConfig:
  """Returns the main job's settings for `Lessons`, with the length limit of notes."""
  main_job = run_presets.main_job()
  return dataclasses.replace(
    main_job,
    model=model,
    task="experiments.sleep.train_nano:Lessons",
    seed=seed,
    num_steps=num_steps,
    data_parallel_size=1,
    rollout=dataclasses.replace(main_job.rollout, prompts_per_step=32, max_tokens=160),
    evaluation=EvaluationConfig(num_problems=512, temperature=1.0),
  )


def reinforce(config: RunConfig, directory: pathlib.Path) -> None:
  """Trains a model with GRPO and writes `directory`/model; resumes an earlier call."""
  policy = policy_lib.load_policy(config.model, config.numerics)
  is_started = checkpoint.latest_step(directory / "checkpoints") is not None
  say = functools.partial(print, flush=True)
  result = rl.train(config, policy, Lessons(), directory, resume=is_started, log=say)
  huggingface.save(
    directory / "model",
    policy_lib.exported_weights(config.weights, policy, result.state.params),
    policy.model,
    tokenizer=policy.tokenizer,
  )


def stated(
  model: str, split: str, num_contexts: int, seed: int, temperature: float = 1.0
) -> list[dict[str, bool]]:
  """Returns, for each context, whether the model's notes state each person's fact.

  Args:
    model: the sleep model.
    split: split of the contexts.
    num_contexts: how many contexts, from the first on.
    seed: sampling seed.
    temperature: sampling temperature; rollouts use 1.
  """
  task = StatefulWordProblems()
  contexts = task.contexts(split)[:num_contexts]
  engine = Engine(
    loading.load_model(model), config=EngineConfig(page_size=16, max_num_seqs=64, max_model_len=512)
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
    facts = stateful.facts_in(answer.text)
    wanted = stateful.facts_in(contexts[index].facts)
    found[index] = {fact.split()[0]: fact in facts for fact in wanted}
  return found


def right_facts(found: Sequence[Mapping[str, bool]]) -> np.ndarray:
  """Returns the share of each context's facts that are stated, f64[contexts]."""
  return np.array([np.mean([*facts.values()]) for facts in found])


def compare(warm: str, after: str, split: str, num_contexts: int, seed: int) -> str:
  """Returns one line: correct facts before and after RL, and the paired difference."""
  found = [stated(model, split, num_contexts, seed) for model in (warm, after)]
  first, last = map(right_facts, found)
  gain = measure.mean(100 * (last - first))
  probe = [
    right for facts in found[1] for person, right in facts.items() if person not in LEARNT_NAMES
  ]
  return (
    f"{split}: right facts at temperature 1, {len(first)} contexts: {100 * first.mean():.1f} %"
    f" warm, {100 * last.mean():.1f} % reinforced, gain {gain.value:.1f} ±"
    f" {gain.high - gain.value:.1f} points (95 %);"
    f" {100 * np.mean(probe):.1f} % of the {len(probe)} of people without documents"
  )


def main(args: flags.FlagValues) -> None:
  logging.set_verbosity(logging.WARNING)
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
    measure.say(
      compare(str(warm / "model"), str(last / "model"), split, args.num_contexts, args.seed)
    )
  print(f"wrote {last / 'model'}")


if __name__ == "__main__":
  flags.DEFINE_string("workdir", "runs/nano_sleep", "Output directory for checkpoints and models.")
  flags.DEFINE_string("start", "nano", "Initial model of the warm start, of nano's shape.")
  flags.DEFINE_bool("keeps_embeddings", False, "Whether to freeze the token embeddings.")
  flags.DEFINE_integer(
    "num_tokens", 2_000_000, "Budget of the warm start in tokens, including padding.", 1
  )
  flags.DEFINE_float("learning_rate", 1.2e-3, "Peak learning rate of the warm start.")
  flags.DEFINE_integer("num_steps", 30, "Number of reinforcement learning steps.", 1)
  flags.DEFINE_integer(
    "num_contexts", 300, "Number of contexts per split for the final evaluation of facts.", 2
  )
  flags.DEFINE_integer("seed", 0, "Seed of documents and rollouts.")
  measure.command(main)
