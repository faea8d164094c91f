"""Compares the gradient of a realistic model with torch's, on the same micro-batch.

Claim: natively, on a CPU, the gradient of a 135M model processes at least 1.3 times as many rows
per second as torch's, in float32 and in bfloat16, within the memory that the trainer plans.
Command: bash launch/local.sh experiments.throughput.gradient --model=DIR --workdir=runs/gradient
  torch and transformers are installed by `bash launch/peers.sh`; --torch_python names another
  Python that has them
  --seconds=200 ends after the cell that is running then; the same command continues
  a check in a minute: --model=nano-directory --rounds=1 --lengths=64
Hardware: 2 CPU cores, 14 GiB; about 40 minutes. Numbers: docs/results/real/gradient.md

The micro-batch has sequences of random tokens of equal length, so neither side pads; the first
quarter of each is a prompt without loss. The loss is that of a first optimiser step on completions
with alternating advantages of 1 and -1: the sum over completion tokens of -advantage * ratio,
divided by their number, where the ratio is 1 and its gradient is that of the log-probability. Each
side runs in its own process; sides take turns within a round, and the first gradient of a process,
which compiles, is not counted. Losses and gradient norms are compared. Peak memory is the maximum
while the process computes further gradients, minus what it holds between two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any, NamedTuple

from absl import flags
import numpy as np

from experiments import cells as cells_lib, measure, peer_process
from seerjax import host_memory

DTYPES = ("float32", "bfloat16")
# Target: ratio of our rows per second to torch's, each with its better setting.
LEAST_OF_TORCH = 1.3
# Tolerances: both sides compute the same gradient, up to rounding.
NEAR = {"float32": 1e-3, "bfloat16": 0.05}

Say = Callable[[str], None]
# Computes a gradient once and returns (loss, leaves); and a function that frees its memory.
Gradient = Callable[[], tuple[float, list[Any]]]
Forget = Callable[[], None]


class Side(NamedTuple):
  """A display label, the kind of builder, and whether layers are recomputed."""

  label: str
  kind: str
  is_again: bool


SIDES = {
  "ours": Side("SeerJAX, remat=none", "ours", False),
  "ours-again": Side("SeerJAX, remat=layer", "ours", True),
  "torch": Side("torch", "transformers", False),
  "torch-again": Side("torch, gradient checkpointing", "transformers", True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Configuration of the measurement.

  Attributes:
    model: a Hugging Face directory.
    lengths: rows per sequence, by dtype.
    sequences: sequences per micro-batch, by dtype.
    num_threads: threads of torch.
  """

  model: str
  lengths: dict[str, int]
  sequences: dict[str, int]
  num_threads: int = 2

  def rows(self, dtype: str) -> int:
    return self.lengths[dtype] * self.sequences[dtype]

  def num_prompt(self, dtype: str) -> int:
    """Returns the number of prompt tokens of a sequence, which have no loss."""
    return self.lengths[dtype] // 4


class Cell(NamedTuple):
  """One timed gradient."""

  dtype: str
  side: str
  round: int


def tokens_of(config: Config, dtype: str, vocab_size: int) -> np.ndarray:
  """Returns i64[sequences, length + 1]: the inputs, followed by the last target."""
  random = np.random.default_rng(0)
  return random.integers(3, vocab_size, (config.sequences[dtype], config.lengths[dtype] + 1))


def advantages(count: int) -> np.ndarray:
  return np.where(np.arange(count) % 2, 1.0, -1.0).astype(np.float32)


def our_gradient(config: Config, dtype: str, is_again: bool) -> tuple[Gradient, Forget, int]:
  """Returns the trainer's gradient, as in a run of the model, and its planned bytes."""
  import jax

  from seerjax.models import parameters
  from seerjax.run import policy as policy_lib, presets, programs
  from seerjax.trainer import losses
  from seerjax.types import Completion, Request, Rollout, RolloutGroup, SamplingParams, Verdict

  run = presets.named_model()
  run = dataclasses.replace(
    run,
    model=config.model,
    numerics=dataclasses.replace(run.numerics, backend="native", compute_dtype=dtype),
    rollout=dataclasses.replace(run.rollout, max_tokens=config.lengths[dtype]),
    trainer=dataclasses.replace(run.trainer, remat="layer" if is_again else "none"),
  )
  policy = policy_lib.load_policy(config.model, run.numerics)
  made = programs.make_programs(run.shared, policy.model)
  run, trainer = made.config, made.trainer
  groups, num_prompt = [], config.num_prompt(dtype)
  for index, row in enumerate(tokens_of(config, dtype, policy.model.vocab_size).tolist()):
    prompt, answer = tuple(row[:num_prompt]), tuple(row[num_prompt:])
    zeros, sampling = np.zeros(len(answer), np.float32), SamplingParams(max_tokens=len(answer))
    request = Request(request_id=str(index), prompt=prompt, sampling=sampling)
    completion = Completion(
      request_id=str(index), tokens=answer, behaviour_logprobs=zeros, raw_logprobs=zeros, text="",
      finish_reason="length", policy_version=0,
    )  # fmt: skip
    verdict = Verdict(reward=1.0, correct=True, well_formed=True)
    rollout = Rollout(request=request, completion=completion, verdict=verdict)
    problem: Any = None
    groups.append(RolloutGroup(group_index=index, problem=problem, rollouts=(rollout,)))
  batch = programs.pack(
    run.engine, run.trainer, trainer.decoder, groups, advantages(len(groups))[:, None]
  )
  if batch.targets.shape[0] > 1 or int(np.sum(batch.tokens.num_rows)) != config.rows(dtype):
    raise ValueError(
      f"--rows: got {config.rows(dtype)}, which do not fit a micro-batch of"
      f" {batch.targets.shape[1]} rows; request fewer."
    )
  params = parameters.compute_params(policy.params, run.numerics)
  denominators = losses.denominators(batch)

  def gradient() -> tuple[float, list[Any]]:
    total, metrics, _ = trainer.gradient(params, batch, denominators, None)
    return float(metrics["loss"]), jax.block_until_ready(jax.tree.leaves(total))

  layout = programs.layout(run.engine, run.trainer, trainer.decoder)
  return gradient, lambda: None, trainer.plan(params, layout, 1).learning


def their_gradient(config: Config, dtype: str, is_again: bool) -> tuple[Gradient, Forget, int]:
  """Returns torch's gradient of the transformers model; planned bytes are 0."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(config.num_threads)
  transformers.logging.set_verbosity_error()
  model = transformers.AutoModelForCausalLM.from_pretrained(
    config.model, dtype=getattr(torch, dtype)
  ).train()
  if is_again:
    model.gradient_checkpointing_enable()
  tokens = torch.tensor(tokens_of(config, dtype, model.config.vocab_size))
  ids, targets = tokens[:, :-1], tokens[:, 1:]
  weights = torch.tensor(advantages(len(tokens)))[:, None].repeat(1, ids.shape[1])
  weights[:, : config.num_prompt(dtype) - 1] = 0.0
  weights /= (weights != 0).sum()

  def gradient() -> tuple[float, list[Any]]:
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    logprobs = -torch.nn.functional.cross_entropy(
      logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    loss = -(torch.exp(logprobs - logprobs.detach()) * weights.flatten()).sum()
    loss.backward()
    return loss.item(), [leaf.grad.float().numpy() for leaf in model.parameters()]

  return gradient, model.zero_grad, 0


BUILDERS = {"ours": our_gradient, "transformers": their_gradient}


def answers(side: str, dtype: str, config: Config) -> Iterator[dict[str, Any]]:
  """Runs a side: yields a record when ready, then one for each line on stdin."""
  gradient, forget, plan = BUILDERS[SIDES[side].kind](config, dtype, SIDES[side].is_again)
  loss, leaves = gradient()
  norm = float(np.sqrt(sum(float(np.vdot(leaf, leaf)) for leaf in map(np.asarray, leaves))))
  del leaves
  forget()
  held = int(host_memory.resident_bytes())
  # Resets the peak, so that it excludes memory used by compilation.
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  yield dict(loss=loss, norm=norm, held=held, plan=plan)
  for _ in sys.stdin:
    _, took = measure.clocked(lambda: gradient()[0])  # The gradient itself is dropped at once.
    yield dict(seconds=took.seconds, cpu=took.cpu_seconds, peak=peer_process.peak_memory())


class Process(peer_process.Process):
  """A side in a separate process, which is ready when the constructor returns."""

  def __init__(self, side: str, dtype: str, config: Config, python: str):
    super().__init__("experiments.throughput.gradient", "--serve", python=python)
    self.ready = self.ask(json.dumps([side, dtype, dataclasses.asdict(config)]))

  def ask(self, line: str = "go") -> dict[str, Any]:
    """Sends a line and returns the reply.

    Raises:
      RuntimeError: if the side reports an error, or its process ended.
    """
    if "error" in (found := super().ask(line)):
      raise RuntimeError(f"a side does not run here: {found['error']}")
    return found


def table(records: Sequence[dict[str, Any]], config: Config) -> str:
  """Returns medians by dtype and side, and the targets, as Markdown."""
  rows, aims = [], []
  best: dict[tuple[str, str], float] = {}
  within = []
  for dtype in DTYPES:
    for name, side in SIDES.items():
      own = [r for r in records if (r["dtype"], r["side"]) == (dtype, name)]
      if not own:
        continue
      seconds = [record["seconds"] for record in own]
      rate = config.rows(dtype) / float(np.median(seconds))
      key = dtype, side.kind
      best[key] = max(best.get(key, 0.0), rate)
      peak, plan = max(record["peak"] - record["held"] for record in own), own[0]["plan"]
      if plan:
        within.append(f"{peak / plan:.2f}")
      rows.append((
        f"{dtype}, {config.rows(dtype):,} rows", side.label, len(own),
        measure.spread(seconds, ".2f"), f"{np.median([record['cpu'] for record in own]):.2f}",
        f"{rate:.1f}", f"{peak / 2**20:,.0f}", f"{plan / 2**20:,.0f}" if plan else "-",
      ))  # fmt: skip
  for dtype in DTYPES:
    if (dtype, "ours") in best and (dtype, "transformers") in best:
      ratio = best[dtype, "ours"] / best[dtype, "transformers"]
      aim = f"{dtype}: at least {LEAST_OF_TORCH:g} of torch's rows/s, each at its best"
      aims.append((aim, f"{ratio:.2f}", measure.holds(ratio >= LEAST_OF_TORCH)))
  if within:
    is_within = max(map(float, within)) <= 1
    aims.append(("peak at most as planned", f"{', '.join(within)} of it", measure.holds(is_within)))
  names = (
    "dtype", "side", "rounds", "seconds (range)", "CPU seconds", "rows/s", "peak, MiB",
    "planned, MiB",
  )  # fmt: skip
  return f"{measure.table(names, rows)}\n\n{measure.table(('aim', 'measured', 'holds'), aims)}\n"


def differing(ready: dict[tuple[str, str], dict[str, Any]]) -> str:
  """Returns a line on differing losses or norms of the sides; "" if they agree."""
  found = []
  for dtype in DTYPES:
    for what in ("loss", "norm"):
      values = [one[what] for key, one in ready.items() if key[0] == dtype]
      # With advantages of both signs the loss may be zero up to rounding.
      near = NEAR[dtype] * max([1.0, *map(abs, values)])
      if values and max(values) - min(values) > near:
        found.append(f"{dtype} {what}: {values}")
  return "; ".join(found)


def run(
  config: Config,
  sides: Sequence[str],
  dtypes: Sequence[str],
  rounds: int,
  directory: pathlib.Path,
  say: Say,
  *,
  torch_python: str = "",
  seconds: float = np.inf,
) -> list[dict[str, Any]]:
  """Measures missing cells, storing each at once; prints, and writes table.md.

  Raises:
    ValueError: if a name is unknown, or two sides compute different gradients.
  """
  peer_process.check_names("--sides", sides, SIDES)
  peer_process.check_names("--dtypes", dtypes, DTYPES)
  interpreters = peer_process.pythons(torch_python)
  path, settings = directory / cells_lib.FILE_NAME, dataclasses.asdict(config)
  settings.pop("model")
  begin = time.monotonic()
  for dtype in dtypes:
    done = {(r["dtype"], r["side"], r["round"]) for r in cells_lib.read(path, settings)}
    missing = [Cell(dtype, side, r) for r in range(rounds) for side in sides]
    missing = [cell for cell in missing if cell not in done]
    if not missing or time.monotonic() - begin > seconds:
      continue
    processes: dict[str, Process] = {}
    try:
      for cell in missing:
        if time.monotonic() - begin > seconds:
          break
        if cell.side not in processes:
          python = interpreters[SIDES[cell.side].kind]
          processes[cell.side] = Process(cell.side, dtype, config, python)
        process = processes[cell.side]
        record = cell._asdict() | process.ready | process.ask() | dict(settings=settings)
        cells_lib.append(path, record)
        say(f"{dtype}, round {cell.round}, {cell.side}: {record['seconds']:.2f} s")
    finally:
      for process in processes.values():
        process.close()
  records = cells_lib.read(path, settings)
  apart = differing({(r["dtype"], r["side"]): r for r in records})
  if apart:
    raise ValueError(
      f"{path}: got gradients that differ ({apart}), expected one; look at the sides."
    )
  text = table(records, config)
  (directory / "table.md").write_text(text)
  say(f"\n{text}\nwritten to {directory}")
  return records


def main(args: flags.FlagValues) -> None:
  if args.serve:
    side, dtype, config = json.loads(sys.stdin.readline())
    peer_process.serve(answers(side, dtype, Config(**config)))
    return
  config = Config(
    model=args.model,
    lengths=dict(zip(DTYPES, map(int, args.lengths), strict=True)),
    sequences=dict(zip(DTYPES, map(int, args.sequences), strict=True)),
  )
  run(
    config, args.sides, args.dtypes, args.rounds, pathlib.Path(args.workdir), measure.say,
    torch_python=args.torch_python, seconds=args.seconds,
  )  # fmt: skip


if __name__ == "__main__":
  flags.DEFINE_string(
    "model", "models/smollm2-135m-instruct", "Hugging Face directory of the model."
  )
  flags.DEFINE_list("sides", list(SIDES), f"Sides to measure, from {', '.join(SIDES)}.")
  flags.DEFINE_list("dtypes", list(DTYPES), f"Data types to measure, from {', '.join(DTYPES)}.")
  flags.DEFINE_list("lengths", ["256", "128"], "Tokens per sequence, in float32 and in bfloat16.")
  flags.DEFINE_list(
    "sequences", ["8", "2"], "Sequences per micro-batch, in float32 and in bfloat16."
  )
  flags.DEFINE_integer("rounds", 5, "Number of gradients per side, after one warm-up.", 1)
  flags.DEFINE_float("seconds", 1e9, "Time budget: no gradient starts after this many seconds.", 0)
  flags.DEFINE_string(
    "torch_python", "", "Python with torch; by default this one, or the one in .venv-3.11."
  )
  flags.DEFINE_string("workdir", "runs/real_gradient", "Output directory for numbers and table.")
  flags.DEFINE_bool("serve", False, "Internal: run the side named on stdin.")
  measure.command(main)
