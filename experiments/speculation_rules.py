"""Compares the acceptance of verification rules on recorded logits of real models.

Claim: with the target's own noise (own-sample verification) acceptance is nearly that of rejection
sampling (within 2 % of its tokens per step), and siblings drawn by Gumbel-top-k are accepted at
least as often as with SpecInfer's multi-step sampling at equal width. Block verification gains a
few percent, at the cost of a text that depends on the draft.
Command: bash launch/local.sh experiments.speculation_rules --workdir=runs/speculation_rules
Hardware: 2 CPU cores, 2 GiB, about 3 minutes. Numbers: docs/results/speculation_rules.md

Nano answers word problems, sampled at temperature 1 and greedily; the logits of target and drafts
are recorded at every token of every completion (record.npz in --workdir). Drafts: nano with its
weights rounded to INT8 (per output channel, symmetric), nano with Gaussian noise on its logits, and
every model named in --config.drafts.

A rule that samples from the target's distribution produces the target's texts. Its acceptance can
therefore be computed along recorded texts of the target: given the next token x, the accepted child
was the j-th one with probability

    accepted[j](x) / p(x),    accepted[j](x) = P(child j is x, and is accepted)

which needs only the recorded texts. For `gumbel_top_k` the noise is drawn conditional on x being
sampled. Steps follow each text, 8 deep; the last may be cut by its end. Block verification looks
ahead, so its tokens per step are averaged over steps from every position, and compared with
rejection computed in the same way. Every rule is also executed on children drawn at recorded
positions, as a check.

Widths: the tree <1, 1, w, 1, 1, 1, 1, 1> of SpecInfer's tables (arXiv 2305.09781), and the comb, a
chain whose nodes have w - 1 leaf siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any, NamedTuple

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np
import rich.progress

from experiments import configuration
from seerjax.backends.tiled import Tiled
from seerjax.engine import engine as engine_lib
from seerjax.models import (
  config as model_config,
  head,
  huggingface,
  kv_layout,
  loading as models,
  parameters,
  transformer,
)
from seerjax.models.loading import Model
from seerjax.rollout import groups as groups_lib
from seerjax.run import command_line, policy as policy_lib, presets as run_presets
from seerjax.speculation import verification
from seerjax.tasks import loading
from seerjax.types import TokenBatch

DEPTH, WIDTHS = 8, (1, 2, 3, 4, 5)
# The level of SpecInfer's tree with several children.
WIDE_LEVEL = 2
# Draws of a rule's outcome at one recorded position, given its recorded token.
NUM_DRAWS = 32
# Lower bound of divisors. Distributions are the engine's, in f32; recorded tokens have p > 0.
TINY = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """The workload.

  Attributes:
    model: the target: "nano", a Hugging Face directory, a GGUF file, or a Hub id.
    drafts: further draft models with the same tokenizer, named in the same way.
    noise: standard deviation of the noise on the noisy draft's logits.
    num_prompts: number of word problems.
    num_answers: sampled completions per problem, plus a greedy one.
    max_tokens: maximum tokens of a completion.
    kl_threshold: threshold of the KL gates, nats.
    num_calls: positions at which the rules are executed.
    seed: seed of problems, completions and draws.
  """

  model: str = "nano"
  drafts: tuple[str, ...] = ()
  noise: float = 1.0
  num_prompts: int = 128
  num_answers: int = 4
  max_tokens: int = 216
  kl_threshold: float = 0.1
  num_calls: int = 2000
  seed: int = 0

  def __post_init__(self):
    if min(self.num_prompts, self.num_answers, self.max_tokens) < 1 or not self.noise > 0:
      raise ValueError(
        f"Workload: got num_prompts={self.num_prompts}, num_answers={self.num_answers},"
        f" max_tokens={self.max_tokens}, noise={self.noise}, expected at least 1 of each and noise"
        " above 0; leave them out for the usual ones."
      )


class Record(NamedTuple):
  """Logits at every token of some completions, concatenated.

  Attributes:
    tokens: i32[n], tokens of the target's completions.
    ends: i32[a], end of each completion, ascending; the last is n.
    target: f32[n, v], the target's logits for each token.
    drafts: name -> f32[n, v], the drafts' logits.
  """

  tokens: np.ndarray
  ends: np.ndarray
  target: np.ndarray
  drafts: dict[str, np.ndarray]


def softmax(logits: np.ndarray) -> np.ndarray:
  """Returns the distributions at temperature 1, f64[n, v]."""
  logits = logits.astype(np.float64)
  chances = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return chances / chances.sum(axis=-1, keepdims=True)


# Recording.


def rounded(params: Any) -> Any:
  """Returns master weights with matrices rounded to INT8 times a scale per output channel."""

  def leaf(path: Any, weights: Any) -> Any:
    weights = np.asarray(weights)
    if weights.ndim < 2:
      return weights
    name = str(path[-1].key)
    # Contraction axes: the embedding's rows are the head's output channels; of slabs, the sum.
    axes = {"embed": (1,), "head": (2,), "down": (0, 1), "out": (0, 1)}.get(name, (1,))
    scale = np.maximum(np.abs(weights).max(axis=axes, keepdims=True), TINY) / 127
    return (np.round(weights / scale) * scale).astype(weights.dtype)

  return jax.tree_util.tree_map_with_path(leaf, params)


class Logits:
  """Computes the logits of a model along whole texts."""

  def __init__(self, model: model_config.TransformerConfig, params: Any, numerics: Any):
    self._numerics = model_config.numerics_for(model, numerics)
    self._params = parameters.compute_params(params, self._numerics)
    self._program = jax.jit(
      functools.partial(_logits, config=model, numerics=self._numerics),
      static_argnames=("size",),
    )

  def along(self, tokens: Sequence[int], first: int) -> np.ndarray:
    """Returns f32[t, v], the logits for each token from `first` on."""
    size = 64
    while size < len(tokens):
      size *= 2
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    found = self._program(self._params, padded, np.int32(len(tokens)), size=size)
    return np.asarray(found)[first - 1 : len(tokens) - 1]


def _logits(
  params: Any, tokens: jax.Array, count: jax.Array, *, size: int, config: Any, numerics: Any
) -> jax.Array:
  """Returns the logits f32[n, v] after each of the first `count` tokens, i32[n], of a sequence."""
  page_size, tile = numerics.kv_split, numerics.query_tile
  rows = jnp.arange(size, dtype=jnp.int32)
  starts = jnp.arange(-(-size // tile), dtype=jnp.int32) * tile
  num_pages = -(-size // page_size)
  table = jnp.arange(1, num_pages + 1, dtype=jnp.int32)[None, :]
  batch = TokenBatch(
    tokens=tokens,
    positions=rows,
    slots=jnp.where(rows < count, rows + page_size, 0),
    num_rows=count,
    segment_start=starts,
    segment_length=jnp.clip(count - starts, 0, tile),
    page_table=jnp.repeat(table, starts.shape[0], axis=0),
    num_segments=(count + tile - 1) // tile,
  )
  pages = kv_layout.ScratchPages(num_pages + 1, page_size)
  hidden, _ = transformer.forward(params, batch, pages, config=config, numerics=numerics)
  tiled = Tiled(dataclasses.replace(numerics, implementation="tiled"))
  table = params.get("head")
  if table is None:
    table = params["embed"].reshape(numerics.reduction_shards, -1, config.hidden_size)
  weights = {"final_norm": params["final_norm"], "head": table}

  def of_rows(weights: Any, hidden: Any, one: jax.Array) -> jax.Array:
    return head.logits_rows(tiled, config, None, weights, hidden, one)

  whole = tiled.whole_rows(size)
  hidden = jnp.pad(hidden, ((0, whole - size), (0, 0)))
  return tiled.map_rows(of_rows, weights, hidden, count)[:size]


def recorded(workload: Workload) -> tuple[Record, Record]:
  """Returns the records of sampled and of greedy completions.

  Raises:
    ValueError: if a draft has another vocabulary.
  """
  job = run_presets.main_job()
  policy = policy_lib.load_policy(workload.model, job.numerics)
  sources = {
    "target": Logits(policy.model, policy.params, job.numerics),
    "INT8": Logits(policy.model, rounded(policy.params), job.numerics),
  }
  for name in workload.drafts:
    directory = models.path_of(name)
    shape = huggingface.load_config(directory)
    numerics = model_config.numerics_for(shape, job.numerics)
    params, shape = huggingface.load(directory, numerics, allow_int8=True)
    if shape.vocab_size != policy.model.vocab_size:
      raise ValueError(
        f"--config.drafts: got {name!r} of {shape.vocab_size} tokens, expected"
        f" {policy.model.vocab_size}, the target's; name a draft of its tokenizer."
      )
    sources[pathlib.Path(name).name] = Logits(shape, params, job.numerics)
  task = loading.load(job.task)
  weights = parameters.compute_params(policy.params, job.numerics)
  engine = engine_lib.Engine(Model(policy.model, weights, job.numerics), config=job.engine)
  rng = np.random.default_rng(workload.seed)
  records = []
  for temperature, count in ((1.0, workload.num_answers), (0.0, 1)):
    config = dataclasses.replace(
      job.rollout, group_size=max(count, 2), max_tokens=workload.max_tokens
    )
    requests = [
      dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, temperature=temperature)
      )
      for index in range(workload.num_prompts)
      for request in groups_lib.group_requests(
        task.problem("heldout", index),
        group=index,
        step=0,
        config=config,
        tokenizer=policy.require_tokenizer(),
        seed=workload.seed,
      )[:count]
    ]
    answers = engine.generate(requests)
    laws: dict[str, list[np.ndarray]] = {name: [] for name in sources}
    pairs = list(zip(requests, answers, strict=True))
    for request, answer in rich.progress.track(pairs, f"logits at temperature {temperature:g}"):
      text = [*request.prompt, *answer.tokens]
      for name, source in sources.items():
        laws[name].append(source.along(text, len(request.prompt)))
    whole = {name: np.concatenate(parts) for name, parts in laws.items()}
    target = whole.pop("target")
    noise = rng.normal(size=target.shape).astype(np.float32) * workload.noise
    whole[f"noise {workload.noise:g}"] = target + noise
    ends = np.cumsum([len(answer.tokens) for answer in answers])
    tokens = np.concatenate([np.asarray(answer.tokens, np.int32) for answer in answers])
    records.append(Record(tokens, ends, target, whole))
  return records[0], records[1]


# Probability that child j is accepted, given the recorded token at each position: f64[n, w].


def ranked(q: np.ndarray, said: np.ndarray) -> np.ndarray:
  """Uses the draft's most probable tokens as children: argmax, top 2, ..."""
  order = np.argsort(-q, axis=1, kind="stable")[:, : WIDTHS[-1]]
  return (order == said[:, None]).astype(np.float64)


def independent(q: np.ndarray, said: np.ndarray) -> np.ndarray:
  """Uses independent samples of the draft as children, verified with the target's own sample."""
  chance = q[np.arange(len(q)), said][:, None]
  return chance * (1 - chance) ** np.arange(WIDTHS[-1])[None]


def coupled(p: np.ndarray, q: np.ndarray, said: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Uses `gumbel_top_k` with the target's noise, drawn conditional on the recorded token."""
  held = np.zeros((len(p), WIDTHS[-1]))
  rows = np.arange(len(p))
  for _ in range(NUM_DRAWS):
    # E / p is minimal for the sampled token, an exponential time of rate 1; others are later.
    time = rng.exponential(size=(len(p), 1))
    race = p * time + rng.exponential(size=p.shape)
    race[rows, said] = (p * time)[rows, said]
    with np.errstate(divide="ignore", invalid="ignore"):
      finish = np.where(q > 0, race / q, np.inf)
    order = np.argsort(finish, axis=1, kind="stable")[:, : WIDTHS[-1]]
    held += order == said[:, None]
  return held / NUM_DRAWS


def mss(
  p: np.ndarray,
  q: np.ndarray,
  said: np.ndarray,
  width: int,
  drawn: str,
  rng: np.random.Generator,
  num_draws: int,
) -> np.ndarray:
  """Evaluates `verification.mss` with `width` children; width 1 is `rejection`.

  Results up to the j-th child do not depend on the width, so columns may be cut off.
  """
  rows = np.arange(len(p))
  held = np.zeros((len(p), width))
  for _ in range(num_draws):
    rest, law, reached = p, q, np.ones(len(p))
    for child in range(width):
      least = np.minimum(rest, law)
      held[:, child] += reached * least[rows, said]
      reached = reached * np.maximum(1 - least.sum(axis=1), 0)
      failing = np.maximum(law - rest, 0)
      left = np.maximum(rest - law, 0)
      totals = left.sum(axis=1, keepdims=True)
      rest = np.where(totals > 0, left / np.maximum(totals, TINY), rest)
      if drawn == "without_replacement":
        edges = np.cumsum(failing, axis=1)
        draws = (edges <= rng.random((len(p), 1)) * edges[:, -1:]).sum(axis=1)
        law = law.copy()
        law[rows, np.minimum(draws, p.shape[1] - 1)] = 0
        law = law / np.maximum(law.sum(axis=1, keepdims=True), TINY)
  return held / num_draws / np.maximum(p[rows, said], TINY)[:, None]


# Steps along texts.


class Walked(NamedTuple):
  """Expected results of steps of up to `DEPTH` drafted tokens, along all texts.

  Attributes:
    num_steps: f64[a], expected steps of each text.
    reached: f64[d], expected steps in which all levels before a level are accepted.
    accepted: f64[d], expected steps in which the level is accepted too.
  """

  num_steps: np.ndarray
  reached: np.ndarray
  accepted: np.ndarray


def walked(
  record: Record, goes_on: Sequence[np.ndarray], ends_here: Sequence[np.ndarray]
) -> Walked:
  """Computes the expected steps along each text.

  Args:
    record: the texts.
    goes_on: by level, f64[n]: probability that a child with children of its own is accepted.
    ends_here: by level, f64[n]: probability that a leaf is accepted.
  """
  starts = np.concatenate([[0], record.ends[:-1]])
  num_steps = np.zeros(len(starts))
  reached, accepted = np.zeros(DEPTH), np.zeros(DEPTH)
  for text, (first, end) in enumerate(zip(starts, record.ends)):
    visits = np.zeros(end - first + DEPTH + 3)
    visits[0] = 1.0
    for place in range(end - first):
      chance = visits[place]
      num_steps[text] += chance
      level = 0
      while level < DEPTH and place + level < end - first:
        at = first + place + level
        reached[level] += chance
        on, over = goes_on[level][at] * chance, ends_here[level][at] * chance
        accepted[level] += on + over
        visits[place + level + 2] += over
        visits[place + level + 1] += chance - on - over
        chance = on
        level += 1
      visits[place + level + 1] += chance
  return Walked(num_steps, reached, accepted)


def comb(held: np.ndarray, width: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns the levels of a chain whose nodes have `width` - 1 leaf siblings."""
  return [held[:, 0]] * DEPTH, [held[:, 1:width].sum(axis=1)] * DEPTH


def one_wide_level(held: np.ndarray, width: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns the levels of SpecInfer's <1, 1, w, 1, 1, 1, 1, 1>."""
  goes_on = [held[:, 0]] * DEPTH
  goes_on[WIDE_LEVEL] = held[:, :width].sum(axis=1)
  return goes_on, [np.zeros(len(held))] * DEPTH


def from_everywhere(record: Record, p: np.ndarray, q: np.ndarray) -> tuple[float, float]:
  """Returns mean tokens of steps from every position, for block verification and for rejection."""
  rows = np.arange(len(p))
  ratio = q[rows, record.tokens] / np.maximum(p[rows, record.tokens], TINY)
  ends = np.repeat(record.ends, np.diff(np.concatenate([[0], record.ends])))
  totals = np.ones(2)
  blocks, chains, weights = (np.ones(len(p)) for _ in range(3))
  for level in range(DEPTH):
    at = rows + level
    is_inside = at < ends
    at = np.where(is_inside, at, 0)
    # Relative to the target, the draft produces the text so far with probability prod(q / p), and
    # it is accepted with probability w.
    blocks = np.where(is_inside, blocks * ratio[at], 0)
    weights = np.where(is_inside, np.minimum(weights / np.maximum(ratio[at], TINY), 1), 0)
    chains = np.where(is_inside, chains * np.minimum(ratio[at], 1), 0)
    totals += (blocks * weights).mean(), chains.mean()
  return float(totals[0]), float(totals[1])


def interval(tokens: np.ndarray, one: Walked, other: Walked | None = None) -> tuple[float, float]:
  """Returns the 95 % interval over texts of tokens per step, or of their ratio to another's."""
  rng = np.random.default_rng(0)
  picks = rng.integers(0, len(tokens), (2000, len(tokens)))
  of = lambda steps: steps[picks].sum(axis=1)
  values = tokens[picks].sum(axis=1) / of(one.num_steps)
  if other is not None:
    values = of(other.num_steps) / of(one.num_steps)
  low, high = np.percentile(values, [2.5, 97.5])
  return float(low), float(high)


# Executing the rules.


def called(
  p: np.ndarray, q: np.ndarray, num_calls: int, rng: np.random.Generator
) -> dict[str, list[float]]:
  """Returns the acceptance rate of children drawn at recorded positions, by width."""
  places = rng.integers(0, len(p), num_calls)
  held = {name: np.zeros(len(WIDTHS)) for name in ("gumbel_top_k", *verification.DRAWN)}
  for place in places:
    target, draft, noise = p[place], q[place], rng.random(p.shape[1])
    children = verification.gumbel_top_k(draft, noise, WIDTHS[-1])
    both = np.stack([target, target])
    for at, width in enumerate(WIDTHS):
      own = [
        verification.own_sample(both, np.array([child]), np.stack([noise, noise])).num_accepted
        for child in children[:width]
      ]
      held["gumbel_top_k"][at] += max(own)
      for drawn in verification.DRAWN:
        size = min(width, int((draft > 0).sum()))
        is_iid = drawn == "iid"
        drawn_children = rng.choice(len(draft), size, p=draft, replace=is_iid)
        uniforms = rng.random(size + 1)
        outcome = verification.mss(target, draft, drawn_children, uniforms, drawn=drawn)
        held[drawn][at] += outcome.num_accepted
  return {name: (counts / len(places)).tolist() for name, counts in held.items()}


# Tables.


def of_draft(
  record: Record, name: str, workload: Workload, *, is_greedy: bool
) -> dict[str, np.ndarray]:
  """Returns f64[n, w] for each rule: P(child j accepted), given the recorded token."""
  q = softmax(record.drafts[name])
  likeliest = ranked(q, record.tokens)
  if is_greedy:
    return {"top k": likeliest}
  p, rng = softmax(record.target), np.random.default_rng(workload.seed)
  most = WIDTHS[-1]
  iid = mss(p, q, record.tokens, most, "iid", rng, 1)
  without = mss(p, q, record.tokens, most, "without_replacement", rng, 4)
  return {
    "top k": likeliest,
    "independent": independent(q, record.tokens),
    "gumbel_top_k": coupled(p, q, record.tokens, rng),
    "rejection, mss iid": iid,
    "mss, no replacement": without,
  }


def table(record: Record, name: str, workload: Workload, *, is_greedy: bool) -> list[str]:
  """Returns the tables of one draft as Markdown lines."""
  rules = of_draft(record, name, workload, is_greedy=is_greedy)
  tokens = np.diff(np.concatenate([[0], record.ends]))
  mode = "greedy" if is_greedy else "sampled"
  lines = [f"### Draft: {name}, {mode}", ""]
  lines.append("Chance that the target's token is among the children.")
  head = "| rule | " + " | ".join(f"width {w}" for w in WIDTHS) + " |"
  lines += ["", head, "|---" * (len(WIDTHS) + 1) + "|"]
  for rule, held in rules.items():
    cells = " | ".join(f"{held[:, :w].sum(axis=1).mean():.3f}" for w in WIDTHS)
    lines.append(f"| {rule} | {cells} |")
  if not is_greedy:
    laws = softmax(record.target), softmax(record.drafts[name])
    found = called(*laws, workload.num_calls, np.random.default_rng(workload.seed))
    for rule, values in found.items():
      cells = " | ".join(f"{value:.3f}" for value in values)
      lines.append(f"| called {workload.num_calls:,} times: {rule} | {cells} |")
  for title, levels in (("<1, 1, w, 1, 1, 1, 1, 1>", one_wide_level), ("comb of w", comb)):
    lines += ["", f"Tokens per step, {title}, depth {DEPTH}, including the bonus token.", "", head]
    lines.append("|---" * (len(WIDTHS) + 1) + "|")
    for rule, held in rules.items():
      found = [walked(record, *levels(held, width)) for width in WIDTHS]
      cells = " | ".join(f"{tokens.sum() / one.num_steps.sum():.2f}" for one in found)
      lines.append(f"| {rule} | {cells} |")
  lines += ["", "By position in a chain: held / reached (expected steps).", ""]
  lines.append("| rule | " + " | ".join(map(str, range(1, DEPTH + 1))) + " |")
  lines.append("|---" * (DEPTH + 1) + "|")
  chains = {rule: walked(record, *comb(held, 1)) for rule, held in rules.items()}
  for rule, one in chains.items():
    cells = " | ".join(
      f"{a / max(r, TINY):.3f} ({r:,.0f})" for a, r in zip(one.accepted, one.reached)
    )
    lines.append(f"| {rule} | {cells} |")
  if is_greedy:
    return lines
  own, rival = chains["gumbel_top_k"], chains["rejection, mss iid"]
  ratio = rival.num_steps.sum() / own.num_steps.sum()
  low, high = interval(tokens, own, rival)
  p, q = softmax(record.target), softmax(record.drafts[name])
  block, rejection = from_everywhere(record, p, q)
  away = np.abs(p - q).sum(axis=1).mean() / 2
  lines += [
    "",
    f"Coupled against rejection, chains: {ratio:.3f} times the tokens a step (95 %, over texts:"
    f" {low:.3f} to {high:.3f}). From every position: block {block:.3f}, rejection {rejection:.3f}"
    f" tokens a step. Mean total variation of the two laws: {away:.3f}.",
    "",
    *gates(record, name, rules["gumbel_top_k"], workload),
  ]
  return lines


def gates(record: Record, name: str, held: np.ndarray, workload: Workload) -> list[str]:
  """Returns the effect of KL gates on a coupled chain.

  The gate "block" depends on distributions along a draft after its rejection, which records of the
  target's texts do not contain.
  """
  p, q = softmax(record.target), softmax(record.drafts[name])
  tokens = np.diff(np.concatenate([[0], record.ends]))
  is_let = verification.divergence(p, q) <= workload.kl_threshold
  lines = []
  for kind, chance in (("truncate", held[:, 0] * is_let), ("fuzzy", is_let.astype(np.float64))):
    gate = verification.KlGate(kind=kind, threshold=workload.kl_threshold)
    found = walked(record, *comb(chance[:, None], 1))
    lines.append(
      f"- {gate.described(int(tokens.mean()))}: {tokens.sum() / found.num_steps.sum():.2f} tokens"
      f" per step; lets {is_let.mean():.1%} of tokens through."
    )
  return lines


def run(workload: Workload, directory: pathlib.Path) -> str:
  """Makes or reads the record; writes results.json and table.md; returns the tables."""
  directory.mkdir(parents=True, exist_ok=True)
  records = kept(workload, directory / "record.npz")
  lines = []
  for record, is_greedy in zip(records, (False, True)):
    laws = softmax(record.target)
    entropy = -(laws * np.log(np.maximum(laws, TINY))).sum(axis=1)
    lines += [
      f"## {'Greedy' if is_greedy else 'Sampled'}: {len(record.ends)} answers,"
      f" {len(record.tokens):,} tokens",
      "",
      f"Mean entropy of the target {entropy.mean():.3f} nats;"
      f" {(laws.max(axis=1) > 0.99).mean():.0%} of positions above 0.99.",
      "",
    ]
    for name in record.drafts:
      lines += [*table(record, name, workload, is_greedy=is_greedy), ""]
  text = "\n".join(lines)
  (directory / "table.md").write_text(text + "\n")
  return text


def kept(workload: Workload, path: pathlib.Path) -> tuple[Record, Record]:
  """Returns the records of a file; makes the file if it does not exist.

  Raises:
    ValueError: if the file is of another workload.
  """
  settings = json.dumps(dataclasses.asdict(workload))
  if not path.exists():
    records = recorded(workload)
    arrays: dict[str, Any] = {"settings": np.array(settings)}
    for mode, record in enumerate(records):
      arrays |= {f"{mode}/{field}": getattr(record, field) for field in Record._fields[:3]}
      arrays |= {f"{mode}/draft/{name}": logits for name, logits in record.drafts.items()}
    np.savez(path, **arrays)
    return records
  with np.load(path) as file:
    if str(file["settings"]) != settings:
      raise ValueError(
        f"{path}: got a record of {file['settings']}, expected {settings}; name another --workdir."
      )
    found = []
    for mode in range(2):
      prefix = f"{mode}/draft/"
      drafts = {n.removeprefix(prefix): file[n] for n in file.files if n.startswith(prefix)}
      tokens, ends, target = (file[f"{mode}/{field}"] for field in ("tokens", "ends", "target"))
      found.append(Record(tokens, ends, target, drafts))
  return found[0], found[1]


def main(argv: list[str]) -> None:
  args = flags.FLAGS
  with command_line.refusals():
    command_line.check_arguments(argv)
    workload = configuration.from_flags(Workload, args.config)
    text = run(workload, pathlib.Path(args.workdir))
  print(f"\n{text}\n\nwritten to {args.workdir}")


if __name__ == "__main__":
  configuration.define_flags(Workload(), "runs/speculation_rules")
  app.run(main)
