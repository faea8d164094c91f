"""Measures the cost of a group's suffix tree and the acceptance of its drafts.

Claim: at 1.7 M tokens in 13 groups of 16, appended 16 at a time, a token costs at most 1 us and 150
bytes, and a draft typically 3 us. On real rollouts of nano the acceptance length rises with the
number of sibling texts.
Command: bash launch/local.sh experiments.suffix_drafts --workdir=runs/suffix_drafts
Hardware: 1 CPU core, 3 GiB, about 5 minutes. Numbers: docs/results/speculation.md

Costs are CPU seconds of the process. Appends follow an engine's pattern: sixteen tokens of each of
a group's sixteen requests per call, with the groups in turn, so that caches are cold. Drafts are
made for a text that the tree contains up to its end, as in one process, and for a text that is
three tokens ahead of the tree, as in a replica that is updated in batches.

Acceptance is replayed as in table 2 of Seer (arXiv 2511.14617): for every rollout, given its own
past and n whole sibling texts, drafts of up to 8 tokens are verified against the rollout. The bonus
token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import json
import pathlib
import re
import sysconfig
import time
from typing import NamedTuple

from absl import app, flags
import numpy as np

from seerjax.engine.drafting import DraftQuery
from seerjax.models.loading import Model
from seerjax.run import command_line, policy as policy_lib, presets as run_presets
from seerjax.speculation import group_trees, suffix_drafter, suffix_tree
from seerjax.speculation.suffix_tree import SpeculationArgs

VOCABULARY = 32_000
NUM_REFERENCES = (0, 1, 5, 15)
NUM_PATHS = (1, 2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """The workload.

  Attributes:
    num_groups: number of groups, with one tree each.
    group_size: requests per group.
    num_tokens: tokens per request.
    batch: tokens of a request per append.
    num_prompts: word problems that nano answers `group_size` times.
    seed: seed of streams and problems.
  """

  num_groups: int = 13
  group_size: int = 16
  num_tokens: int = 8192
  batch: int = 16
  num_prompts: int = 20
  seed: int = 0


# Streams: i32[g, r, n] of groups, requests, tokens.


def zipf(workload: Workload, rng: np.random.Generator) -> np.ndarray:
  """Returns independent tokens with Zipf frequencies."""
  share = 1 / np.arange(1, VOCABULARY + 1)
  return rng.choice(VOCABULARY, size=_shape(workload), p=share / share.sum()).astype(np.int32)


def uniform(workload: Workload, rng: np.random.Generator) -> np.ndarray:
  """Returns independent, uniformly distributed tokens."""
  return rng.integers(0, VOCABULARY, _shape(workload)).astype(np.int32)


def reasoning(workload: Workload, rng: np.random.Generator) -> np.ndarray:
  """Returns imitated reasoning: new words, phrases of the group (35 %), the own past (15 %)."""
  share = 1 / np.arange(1, VOCABULARY + 1)
  share /= share.sum()
  phrase_share = np.arange(1, 401) ** -0.8
  phrase_share /= phrase_share.sum()
  texts = np.zeros(_shape(workload), np.int32)
  for group in texts:
    phrases = [rng.choice(VOCABULARY, rng.integers(3, 25), p=share) for _ in phrase_share]
    for text in group:
      at = 0
      while at < text.size:
        draw = rng.random()
        if draw < 0.35:
          piece = phrases[rng.choice(len(phrases), p=phrase_share)]
          piece = piece[: rng.integers(1, piece.size + 1)]
        elif draw < 0.5 and at > 100:
          start = rng.integers(max(0, at - 2000), at - 30)
          piece = text[start : start + rng.integers(3, 30)].copy()
        else:
          piece = rng.choice(VOCABULARY, rng.integers(2, 8), p=share)
        piece = piece[: text.size - at]
        text[at : at + piece.size] = piece
        at += piece.size
  return texts


def code(workload: Workload, rng: np.random.Generator) -> np.ndarray:
  """Returns words of Python's standard library, file by file."""
  del rng  # The texts are fixed.
  wanted = int(np.prod(_shape(workload)))
  ids: dict[str, int] = {}
  tokens: list[int] = []
  for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
    if "site-packages" in path.parts or len(tokens) >= wanted:
      continue
    words = re.findall(r"\w+|[^\w\s]|\n *", path.read_text(errors="ignore"))
    tokens.extend(ids.setdefault(word, len(ids)) for word in words)
  return np.resize(np.asarray(tokens, np.int32), _shape(workload))


def loops(workload: Workload, rng: np.random.Generator) -> np.ndarray:
  """Returns streams in which every request repeats its own fifty tokens."""
  texts = rng.integers(0, VOCABULARY, (workload.num_groups, workload.group_size, 50))
  return np.resize(np.tile(texts, workload.num_tokens // 50 + 1), _shape(workload)).astype(np.int32)


def copies(workload: Workload, rng: np.random.Generator) -> np.ndarray:
  """Returns streams in which all requests of a group have the same random tokens."""
  texts = rng.integers(0, VOCABULARY, (workload.num_groups, 1, workload.num_tokens))
  return np.repeat(texts, workload.group_size, axis=1).astype(np.int32)


STREAMS: dict[str, Callable[[Workload, np.random.Generator], np.ndarray]] = {
  "reasoning": reasoning,
  "code": code,
  "zipf": zipf,
  "uniform": uniform,
  "loops": loops,
  "copies": copies,
}


def _shape(workload: Workload) -> tuple[int, int, int]:
  return workload.num_groups, workload.group_size, workload.num_tokens


# Costs.


class Cost(NamedTuple):
  """Costs of one kind of stream.

  Attributes:
    append: CPU us per token, with all requests of a group in one call.
    append_alone: the same with one request per call, for one group.
    num_bytes: allocated bytes per token.
    draft: CPU us per draft of a text in the tree, 16 per call.
    draft_ahead: the same for a text three tokens ahead of the tree.
    draft_paths: the same with 4 paths.
    match: matched tokens of the text, three tokens ahead like the following fields.
    drafted: tokens per draft.
    accepted: accepted tokens per draft, without the bonus token.
    load: tokens in all trees.
  """

  append: float
  append_alone: float
  num_bytes: float
  draft: float
  draft_ahead: float
  draft_paths: float
  match: float
  drafted: float
  accepted: float
  load: int


def warm_up() -> None:
  """Compiles the measured functions."""
  tree = suffix_tree.SuffixTree()
  tree.append("a", 0, range(1000))
  tree.draft([1, 2], SpeculationArgs(top_k=4))


def cost(texts: np.ndarray, batch: int) -> Cost:
  """Appends a stream, drafting along the way; returns the costs."""
  groups, requests, length = texts.shape
  names = [str(request) for request in range(requests)]
  trees = group_trees.GroupTrees()
  for group in range(groups):
    trees.register_group(str(group))
  linear, paths = SpeculationArgs(), SpeculationArgs(top_k=NUM_PATHS[-1])
  offsets = np.arange(requests + 1) * suffix_tree.DEPTH
  append = draft = draft_ahead = draft_paths = 0.0
  num = matched = drafted = accepted = 0
  for start in range(0, length, batch):
    for group in range(groups):
      updates = [
        (name, start, texts[group, request, start : start + batch])
        for request, name in enumerate(names)
      ]
      before = time.process_time()
      trees.append(str(group), updates)
      append += time.process_time() - before
    here, seen = start + batch, start + batch + 3
    if start % (8 * batch) != 4 * batch or here < suffix_tree.DEPTH or seen + 8 > length:
      continue
    for group in range(groups):
      ids = [str(group)] * requests
      ends = np.ascontiguousarray(texts[group, :, seen - suffix_tree.DEPTH : seen]).ravel()
      output = np.empty((requests, linear.top_k, linear.max_spec_tokens), np.int32)
      before = time.process_time()
      drafts = trees.batch_speculate(ids, offsets, ends, output, linear)
      draft_ahead += time.process_time() - before
      num += requests
      matched += int(drafts.match_lengths.sum())
      drafted += int(drafts.num_tokens.sum())
      place = np.arange(linear.max_spec_tokens)
      holds = (output[:, 0] == texts[group, :, seen : seen + 8]) & (place < drafts.num_tokens)
      accepted += int(np.cumprod(holds, axis=1).sum())
    for group in range(groups):
      ids = [str(group)] * requests
      ends = np.ascontiguousarray(texts[group, :, here - suffix_tree.DEPTH : here]).ravel()
      output = np.empty((requests, linear.top_k, linear.max_spec_tokens), np.int32)
      before = time.process_time()
      trees.batch_speculate(ids, offsets, ends, output, linear, request_ids=names)
      draft += time.process_time() - before
      output = np.empty((requests, paths.top_k, paths.max_spec_tokens), np.int32)
      before = time.process_time()
      trees.batch_speculate(ids, offsets, ends, output, paths, request_ids=names)
      draft_paths += time.process_time() - before
  alone = suffix_tree.SuffixTree()
  append_alone = 0.0
  for start in range(0, length, batch):
    for request, name in enumerate(names):
      tokens = texts[0, request, start : start + batch]
      before = time.process_time()
      alone.append(name, start, tokens)
      append_alone += time.process_time() - before
  return Cost(
    append=append / texts.size * 1e6,
    append_alone=append_alone / texts[0].size * 1e6,
    num_bytes=trees.num_bytes / texts.size,
    draft=draft / num * 1e6,
    draft_ahead=draft_ahead / num * 1e6,
    draft_paths=draft_paths / num * 1e6,
    match=matched / num,
    drafted=drafted / num,
    accepted=accepted / num,
    load=texts.size,
  )


def cost_table(costs: dict[str, Cost]) -> str:
  """Returns the costs as a table in Markdown."""
  lines = [
    "| stream | tokens | append, us per token | one request per call | bytes per token | draft, us"
    " | 3 ahead, us | 4 paths, us | match | drafted | accepted |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
  ]
  lines += [
    f"| {name} | {c.load:,} | {c.append:.2f} | {c.append_alone:.2f} | {c.num_bytes:.0f} |"
    f" {c.draft:.2f} | {c.draft_ahead:.2f} | {c.draft_paths:.1f} |"
    f" {c.match:.1f} | {c.drafted:.2f} | {c.accepted:.2f} |"
    for name, c in costs.items()
  ]
  return "\n".join(lines)


# Acceptance.


class Sampled(NamedTuple):
  """One group's prompt and completions."""

  prompt: list[int]
  answers: list[list[int]]


def sample(workload: Workload) -> list[Sampled]:
  """Returns nano's completions of word problems at temperature 1."""
  from seerjax import numerics as numerics_lib
  from seerjax.engine import engine as engine_lib
  from seerjax.models import parameters
  from seerjax.rollout import groups as groups_lib
  from seerjax.tasks import loading

  job = run_presets.main_job()
  policy = policy_lib.load_policy(job.model, job.numerics)
  task = loading.load(job.task, path=None)
  config = dataclasses.replace(
    job.rollout, groups_per_step=workload.num_prompts, group_size=workload.group_size
  )
  engine = engine_lib.Engine(
    Model(
      policy.model,
      parameters.compute_params(policy.params, job.numerics),
      job.numerics,
      policy.require_tokenizer(),
    ),
    config=job.engine,
    key=numerics_lib.key(workload.seed),
  )
  count = groups_lib.num_problems(task, "train")
  groups = [
    groups_lib.group_requests(
      task.problem("train", groups_lib.problem_index(place, count, workload.seed)),
      group=place,
      step=0,
      config=config,
      tokenizer=policy.require_tokenizer(),
      seed=workload.seed,
    )
    for place in range(workload.num_prompts)
  ]
  done = iter(engine.generate([request for requests in groups for request in requests]))
  return [
    Sampled(list(requests[0].prompt), [list(next(done).tokens) for _ in requests])
    for requests in groups
  ]


def replay(group: Sampled, target: int, num_references: int, args: SpeculationArgs) -> int:
  """Returns the steps to sample a completion, given `num_references` whole sibling completions."""
  drafter = suffix_drafter.SuffixDrafter(args, budget=None)
  num_prompt = len(group.prompt)
  for place in range(1, num_references + 1):
    sibling = (target + place) % len(group.answers)
    tokens = [*group.prompt, *group.answers[sibling]]
    drafter.draft([DraftQuery(str(sibling), "g", tokens, num_prompt, 0)])
  answer = group.answers[target]
  num_known = steps = 0
  while num_known < len(answer):
    query = DraftQuery("target", "g", group.prompt + answer[:num_known], num_prompt, 8 * args.top_k)
    (paths,) = drafter.draft([query])
    # The target's samples are the completion, as far as a path agrees with it.
    counts = [agreement(path, answer[num_known:]) for path in paths]
    held = max(counts, default=0)
    new = answer[num_known : num_known + held + 1]
    num_drafted = len(paths[counts.index(held)]) if paths else 0
    num_known += len(new)
    steps += 1
    if num_drafted:
      drafter.observe("target", "g", num_drafted, len(new) - 1)
  return steps


def agreement(path: Sequence[int], rest: Sequence[int]) -> int:
  """Returns how many tokens of a path equal the following tokens; the last token is not drafted."""
  count = 0
  while count < min(len(path), len(rest) - 1) and path[count] == rest[count]:
    count += 1
  return count


def acceptance_lengths(
  groups: Sequence[Sampled], references: Sequence[int] = NUM_REFERENCES
) -> dict[tuple[int, int], float]:
  """Returns tokens per step, by (known siblings, paths)."""
  lengths = {}
  for num_references in references:
    for num_paths in NUM_PATHS:
      args = SpeculationArgs(top_k=num_paths)
      steps = tokens = 0
      for group in groups:
        for target, answer in enumerate(group.answers):
          steps += replay(group, target, num_references, args)
          tokens += len(answer)
      lengths[num_references, num_paths] = tokens / steps
  return lengths


def acceptance_table(lengths: dict[tuple[int, int], float]) -> str:
  """Returns acceptance lengths and Seer's as a Markdown table."""
  seer = {
    0: (1.70, 1.77, 1.85),
    1: (2.04, 2.14, 2.25),
    5: (2.32, 2.44, 2.59),
    15: (2.53, 2.69, 2.85),
  }
  lines = [
    "| sibling texts | linear | 2 paths | 4 paths | Seer's, Qwen2-VL-72B |",
    "|---|---|---|---|---|",
  ]
  for num_references in sorted({n for n, _ in lengths}):
    ours = " | ".join(f"{lengths[num_references, k]:.2f}" for k in NUM_PATHS)
    theirs = " / ".join(f"{x:.2f}" for x in seer.get(num_references, ())) or "not given"
    lines.append(f"| {num_references} | {ours} | {theirs} |")
  return "\n".join(lines)


def run(workload: Workload, streams: Sequence[str], directory: pathlib.Path) -> str:
  """Measures, prints, and writes results.json and table.md; returns the tables."""
  unknown = sorted(set(streams) - set(STREAMS))
  if unknown:
    raise ValueError(
      f"--streams: got {', '.join(unknown)}, expected some of {', '.join(STREAMS)}; correct it."
    )
  warm_up()
  costs = {}
  for name in streams:
    texts = STREAMS[name](workload, np.random.default_rng(workload.seed))
    costs[name] = cost(texts, workload.batch)
    print(cost_table({name: costs[name]}).splitlines()[-1], flush=True)
  groups = sample(workload) if workload.num_prompts else []
  references = [n for n in NUM_REFERENCES if groups and n < workload.group_size]
  lengths = acceptance_lengths(groups, references)
  tokens = [len(answer) for group in groups for answer in group.answers]
  text = cost_table(costs)
  if groups:
    text += (
      f"\n\n{len(groups)} groups of {workload.group_size} answers, {np.mean(tokens):.1f} tokens on"
      f" average, {max(tokens)} at most\n\n{acceptance_table(lengths)}"
    )
  directory.mkdir(parents=True, exist_ok=True)
  record = dict(
    workload=dataclasses.asdict(workload),
    costs={name: c._asdict() for name, c in costs.items()},
    acceptance=[[*key, length] for key, length in lengths.items()],
  )
  (directory / "results.json").write_text(json.dumps(record, indent=1) + "\n")
  (directory / "table.md").write_text(text + "\n")
  print(f"\n{text}\n\nwritten to {directory}", flush=True)
  return text


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    workload = Workload(
      num_groups=args.num_groups, num_tokens=args.num_tokens, num_prompts=args.num_prompts
    )
    run(workload, args.streams, pathlib.Path(args.workdir))


if __name__ == "__main__":
  flags.DEFINE_list("streams", list(STREAMS), f"Streams to run, from {', '.join(STREAMS)}.")
  flags.DEFINE_integer("num_groups", 13, "Number of groups of 16 requests.", 1)
  flags.DEFINE_integer("num_tokens", 8192, "Number of tokens per request.", 256)
  flags.DEFINE_integer(
    "num_prompts", 20, "Number of word problems that nano answers; 0 skips this part.", 0
  )
  flags.DEFINE_string("workdir", "runs/suffix_drafts", "Output directory for numbers and tables.")
  app.run(main)
