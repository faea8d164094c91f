r"""Runs a rollout under memory pressure: the baseline, then with Seer's parts added one by one.

Claim: chunks and migrating pages, longest groups first, and drafts from sibling texts give the same
texts, to the bit, in 0.59 of the baseline's steps and 0.06 of its tail's steps, without preemption.
Command: bash launch/local.sh experiments.cluster.seer --workdir=runs/seer_rollout
Hardware: 2 CPU cores (four virtual devices), about 10 minutes
Numbers: docs/results/seer_rollout.md

The workload: word problems, with completions by nano of prescribed log-normal lengths, similar
within a group. Schedulers only know `max_tokens`. All systems have the same pages, slots and rows
per step, with so few pages that the first baseline preempts about once per request. Results are in
steps, which do not depend on the machine; for the same reason drafts are made wherever a group's
texts suggest one, without a budget. Seconds are listed too.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import json
import pathlib
import time
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments import measure
from seerjax import metrics, numerics as numerics_lib, parallel
from seerjax.commands import flags as flags_lib
from seerjax.engine import engine as engine_lib, output, runner as runner_lib, timing
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.models import parameters
from seerjax.models.decoder import decide
from seerjax.models.loading import Model
from seerjax.models.tokenizer import Tokenizer
from seerjax.reports import gantt, page
from seerjax.rollout import groups, policies
from seerjax.rollout.divided import DividedRollout
from seerjax.run import policy as policy_lib, self_test
from seerjax.speculation.suffix_drafter import SuffixDrafter
from seerjax.speculation.suffix_tree import SpeculationArgs
from seerjax.tasks import loading
from seerjax.types import Completion, Request, SamplingParams

# A bias that forbids a token: completions end at their prescribed lengths.
FORBIDDEN = -1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """The workload and its memory.

  Attributes:
    model: "nano", a Hugging Face directory, a GGUF file, or a Hub id.
    num_groups: number of word problems.
    group_size: completions per problem.
    mean_tokens: mean of the log-normal length before clipping.
    sigma: standard deviation of the logarithm of the length.
    correlation: correlation of the logarithms within a group.
    max_tokens: maximum length, the only length that schedulers know.
    data_parallel_size: virtual devices.
    page_size: positions per page.
    num_pages: pages per instance.
    max_num_seqs: concurrent sequences per instance.
    rows: rows per step and instance.
    chunk_tokens: chunk length of the divided systems.
    paths: maximum number of paths of a draft.
    seed: seed of problems, lengths and samples.
  """

  model: str = "nano"
  num_groups: int = 48
  group_size: int = 8
  mean_tokens: float = 120.0
  sigma: float = 1.0
  correlation: float = 0.8
  max_tokens: int = 480
  data_parallel_size: int = 4
  page_size: int = 16
  num_pages: int = 81
  max_num_seqs: int = 32
  rows: int = 128
  chunk_tokens: int = 32
  paths: int = 4
  seed: int = 0

  def __post_init__(self):
    if not 1 <= self.data_parallel_size <= parallel.MAX_INSTANCES or self.seed < 0:
      raise ValueError(
        f"Workload: got data_parallel_size={self.data_parallel_size}, seed={self.seed}, expected 1"
        " to"
        f" {parallel.MAX_INSTANCES} (one a device) and at least 0; choose others."
      )
    if not 0 <= self.correlation <= 1 or not self.sigma > 0 or not self.mean_tokens >= 1:
      raise ValueError(
        f"Workload: got correlation={self.correlation}, sigma={self.sigma},"
        f" mean_tokens={self.mean_tokens}, expected 0 to 1, a positive number and at least 1."
      )


class EndsWhereTold(engine_lib.Engine):
  """An engine that ends completions at prescribed lengths that schedulers cannot see."""

  lengths: dict[str, int] = {}

  def __init__(self, *args, **others):
    super().__init__(*args, accept=self._accept, **others)

  def _accept(self, sequence, token, logprob, raw_logprob):
    update = output.accept(sequence, token, logprob, raw_logprob)
    is_over = sequence.num_generated >= self.lengths[update.request_id]
    return update._replace(finish_reason="stop") if is_over else update


def lengths(workload: Workload) -> np.ndarray:
  """Returns the prescribed lengths, i64[g, m]."""
  rng = np.random.default_rng(workload.seed)
  shape = (workload.num_groups, workload.group_size)
  group, member = rng.standard_normal((shape[0], 1)), rng.standard_normal(shape)
  rho, sigma = workload.correlation, workload.sigma
  logs = np.log(workload.mean_tokens) - sigma**2 / 2
  logs = logs + sigma * (np.sqrt(rho) * group + np.sqrt(1 - rho) * member)
  return np.clip(np.exp(logs), 8, workload.max_tokens).astype(np.int64)


def requests(
  num_groups: int, group_size: int, *, tokenizer: Tokenizer, sampling: SamplingParams, seed: int
) -> list[Request]:
  """Returns the requests of groups of word problems."""
  task = loading.load("word_problems")
  found = []
  for group in range(num_groups):
    index = groups.problem_index(group, task.num_problems("train"), seed)
    prompt = groups.prompt_tokens(task.problem("train", index), tokenizer)
    for member in range(group_size):
      found.append(
        Request(
          request_id=f"0/{group}/{member}",
          prompt=prompt,
          sampling=sampling,
          seed=groups.request_seed(seed, 0, group, member),
          group_id=f"0/{group}",
        )
      )
  return found


def systems(workload: Workload) -> dict[str, tuple[Any, bool]]:
  """Returns, by name and in running order, the scheduling policy and whether drafts are made."""
  chunk, pull = workload.chunk_tokens, workload.page_size
  context = policies.ContextAware(chunk_tokens=chunk, min_pull_tokens=pull)
  ours = policies.LongestGroupFirst(chunk_tokens=chunk, min_pull_tokens=pull)
  return {
    "groups, preempting": (policies.GroupFCFS(), False),
    "groups, waiting": (policies.GroupFCFS(reserves=True), False),
    "divided": (policies.Divided(chunk_tokens=chunk, min_pull_tokens=pull), False),
    "+ context": (context, False),
    "ours": (ours, False),
    "+ context + drafts": (context, True),
    "ours + drafts": (ours, True),
  }


def run_system(
  make_engine: Callable[..., EndsWhereTold],
  policy: Any,
  drafter: SuffixDrafter | None,
  asked: list[Request],
) -> tuple[dict[str, Any], DividedRollout, dict[str, Completion]]:
  """Runs one system; returns its numbers, its rollout and its completions."""
  rollout = DividedRollout(make_engine(drafter=drafter), policy)
  begin = time.monotonic()
  found = {completion.request_id: completion for completion in rollout.run(asked)}
  seconds = time.monotonic() - begin
  trace, engine = rollout.trace, rollout.engine
  moved = engine.counters
  numbers = {
    "steps": trace.num_steps,
    "tail_steps": trace.tail_steps(),
    "preemptions_a_request": trace.preemptions / len(asked),
    "rows": sum(trace.rows),
    "moved_bytes": moved.peer_bytes + moved.host.bytes_in + moved.host.bytes_out,
    "migrations": trace.migrations,
    "spills": trace.spills,
    "dropped": trace.dropped,
    "used_pages": float(np.mean(trace.used_pages) / (engine.config.num_pages - 1)),
    "tokens_a_step_and_request": 1.0,
    "seconds": seconds,
  }
  if drafter is not None:
    numbers["tokens_a_step_and_request"] = drafter.acceptance.length
    numbers["acceptance_by_position"] = list(drafter.acceptance.rate_at)
    numbers["acceptance_by_siblings"] = {
      str(count): value for count, value in drafter.acceptance.length_by_references.items()
    }
  return numbers, rollout, found


def table(results: dict[str, dict[str, Any]]) -> str:
  """Returns the results as Markdown."""
  baseline = results["groups, preempting"]
  rows = [
    (name, f"{row['steps']:,}", f"{row['steps'] / baseline['steps']:.2f}",
     f"{row['tail_steps']:,}", f"{row['tail_steps'] / max(baseline['tail_steps'], 1):.2f}",
     f"{row['preemptions_a_request']:.2f}", f"{row['rows']:,}", f"{row['moved_bytes'] / 1e6:.0f}",
     f"{row['tokens_a_step_and_request']:.2f}", f"{row['seconds']:.1f}")
    for name, row in results.items()
  ]  # fmt: skip
  names = (
    "system", "steps", "of the first", "tail steps", "of the first", "preemptions per request",
    "rows", "MB moved", "tokens per step", "seconds",
  )  # fmt: skip
  return measure.table(names, rows)


def rollouts_page(workload: Workload, rollouts: dict[str, DividedRollout]) -> str:
  """Returns the charts of all systems as one HTML page."""
  return page.html_page("Rollouts", [
    f"<h1>{page.escape(name)}</h1>{gantt.section(0, rollout.trace, workload.num_pages - 1)}"
    for name, rollout in rollouts.items()
  ])  # fmt: skip


def run(workload: Workload, directory: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Runs every system and writes results.json, table.md and rollouts.html.

  Raises:
    ValueError: if two systems produce different bits.
  """
  numerics = numerics_lib.NumericsConfig(query_tile=4, slot_tile=32, kv_split=64)
  print(self_test.describe(numerics), flush=True)
  policy = policy_lib.load_policy(workload.model, numerics)
  tokenizer = policy.require_tokenizer()
  bias = tuple((token, FORBIDDEN) for token in tokenizer.eos_ids)
  asked = requests(
    workload.num_groups,
    workload.group_size,
    tokenizer=tokenizer,
    sampling=SamplingParams(max_tokens=workload.max_tokens, logit_bias=bias),
    seed=workload.seed,
  )
  length_of = dict(zip([one.request_id for one in asked], lengths(workload).ravel().tolist()))
  longest = max(len(one.prompt) for one in asked) + workload.max_tokens
  config = engine_lib.EngineConfig(
    page_size=workload.page_size,
    num_pages=workload.num_pages,
    max_num_seqs=workload.max_num_seqs,
    max_model_len=-(-longest // numerics.kv_split) * numerics.kv_split,
    batch_size_buckets=(workload.rows,),
  )
  mesh = parallel.make_mesh(data_parallel_size=workload.data_parallel_size)
  runner = runner_lib.Runner(decide(policy.model, numerics), mesh, 1)
  weights = parameters.compute_params(policy.params, numerics)

  def make_engine(drafter: Any = None) -> EndsWhereTold:
    engine = EndsWhereTold(
      Model(policy.model, weights, numerics),
      config=config,
      key=numerics_lib.key(workload.seed),
      runner=runner,
      drafter=drafter,
      kv_pool=KVPool(KVPoolConfig(host_pages=10**6)),
    )
    engine.lengths = length_of
    return engine

  values = np.asarray(list(length_of.values()))
  print(
    f"{len(asked)} responses of {values.mean():.0f} tokens on average, {values.max()} at most, to"
    f" {workload.num_groups} prompts; {workload.data_parallel_size} instances of"
    f" {workload.num_pages - 1} pages of {workload.page_size} positions",
    flush=True,
  )
  # Also compiles, so that no system's time includes compilation.
  self_test.check_model(runner.decoder, weights, config=config, runner=runner)
  timing.step_seconds(make_engine(), [(1, 1)])
  results, rollouts, first = {}, {}, {}
  for name, (policy_of_system, drafts) in systems(workload).items():
    drafter = SuffixDrafter(SpeculationArgs(top_k=workload.paths), budget=None) if drafts else None
    numbers, rollout, found = run_system(make_engine, policy_of_system, drafter, asked)
    first = first or found
    for request_id, completion in found.items():
      if not completion.has_bits_of(first[request_id]):
        raise ValueError(
          f"{name}: got other bits for request {request_id} than the first system, expected equal"
          " ones; the contract is broken, keep this directory and report it."
        )
    results[name], rollouts[name] = numbers, rollout
    print(
      f"{name:20s} {numbers['steps']:6d} steps, {numbers['tail_steps']:5d} of them for the last"
      f" tenth, {numbers['preemptions_a_request']:.2f} preemptions per request,"
      f" {numbers['seconds']:.1f} s",
      flush=True,
    )
  directory.mkdir(parents=True, exist_ok=True)
  record = {"workload": dataclasses.asdict(workload), "results": results}
  metrics.write_summary(directory / "results.json", json.loads(json.dumps(record)))
  (directory / "table.md").write_text(table(results) + "\n")
  (directory / "rollouts.html").write_text(rollouts_page(workload, rollouts), encoding="utf-8")
  return results


def main(args: flags.FlagValues) -> None:
  workload = flags_lib.from_flags(Workload, args.config)
  jax.config.update("jax_num_cpu_devices", workload.data_parallel_size)
  results = run(workload, pathlib.Path(args.workdir))
  print(table(results))
  print("equal bits: every system sampled the same tokens with the same log-probabilities")
  print(f"charts   {pathlib.Path(args.workdir) / 'rollouts.html'}")


if __name__ == "__main__":
  flags_lib.define_flags(Workload(), "runs/seer_rollout")
  measure.command(main)
