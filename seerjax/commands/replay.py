"""Recomputes any sampled token of a run from its journal, and compares bits.

    seerjax replay --run=runs/grpo --request=STEP/GROUP/MEMBER

  one token:     --token=K
  see it fail:   --perturb=LAYER flips the highest mantissa bit of one weight of that layer

The bits of every token of every run are equal, on any machine of the run's kind; if they are not,
the first layer that differs is named. Exit status: 0 equal bits, 1 other bits, 2 not decidable. It
takes a few seconds and one compilation; more between checkpoints (see below).

A token is a function of (prompt and preceding tokens, sampling parameters, request seed, the run's
key, the weights of its policy version). The run sampled it one row at a time in batches with other
requests; here the whole completion is one prefill.

The weights come from the latest stored checkpoint at or before that version (at the start, from the
model). Steps after the checkpoint are trained again with the run's code from the journal's rollouts
and rewards, which prints one line per step and takes about as long as in the run (train/seconds);
nothing is sampled or judged. This needs the task, to pose its problems, and all these steps must
have been trained under this machine's numerics.

If the bits differ from the journal's, the completion is computed a second time, token by token and
with unperturbed weights, and the hidden states of the two computations are compared layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import pathlib
import sys
from typing import Any, NamedTuple

from absl import flags, logging
import jax
import jax.numpy as jnp
import numpy as np

from seerjax import checkpoint, numerics as numerics_lib, rl, xla_flags
from seerjax.commands import flags as flags_lib
from seerjax.models import (
  config as model_config,
  flax_module,
  head,
  kv_layout,
  parameters,
  transformer,
)
from seerjax.models.decoder import decide
from seerjax.ops import penalties, sampling
from seerjax.rollout import journal as journal_lib
from seerjax.run import (
  policy as policy_lib,
  programs as programs_lib,
  replay as replay_lib,
)
from seerjax.run.config import RunConfig
from seerjax.run.policy import Policy
from seerjax.tasks import loading
from seerjax.trainer import step as step_lib
from seerjax.types import Rollout, RolloutGroup, TokenBatch, TrainState

PAGE_SIZE = 32


class Recorded(NamedTuple):
  """One request of a run, as recorded.

  Attributes:
    config: the run's configuration, on one device (the number of devices changes no bit).
    rollout: the rollout from the journal.
  """

  config: RunConfig
  rollout: Rollout


class Finding(NamedTuple):
  """Result of a replay.

  Attributes:
    is_equal: whether every compared token and log-probability has the journal's bits.
    text: readable result.
    layer: the first layer with differing rows in the two computations (0 is the embedding), None
      if none does or the comparison was not made.
  """

  is_equal: bool
  text: str
  layer: int | None


def read_config(directory: pathlib.Path) -> RunConfig:
  """Returns a run's configuration.

  Raises:
    ValueError: if there is no run.
  """
  path = directory / "config.json"
  if not path.is_file():
    raise ValueError(
      f"--run: got {directory}, which has no config.json, expected a run's directory; correct it."
    )
  return flags_lib.read(RunConfig, path)


def place_of(request: str) -> tuple[int, int, int]:
  """Parses "STEP/GROUP/MEMBER"; returns (step, group, member).

  Raises:
    ValueError: if it is not three numbers.
  """
  parts = request.split("/")
  if len(parts) != 3 or not all(part.isdigit() for part in parts):
    raise ValueError(
      f"--request: got {request!r}, expected STEP/GROUP/MEMBER, such as 3/0/5; a journal's names"
      " count steps from 0."
    )
  step, group, member = map(int, parts)
  return step, group, member


def find(directory: pathlib.Path, request: str) -> Recorded:
  """Reads one request of a run.

  Raises:
    ValueError: if the run or the request does not exist, or belongs to other numerics than this
      machine's.
  """
  config = read_config(directory)
  place = place_of(request)
  header, entries = journal_lib.read(directory / journal_lib.FILE_NAME)
  known: dict[int, int] = {}
  entry = None
  for candidate in entries:
    known[candidate.step] = known.get(candidate.step, 0) + 1
    if (candidate.step, candidate.group, candidate.member) == place:
      entry = candidate
  if entry is None:
    there = ", ".join(f"{step} ({count} rollouts)" for step, count in sorted(known.items()))
    raise ValueError(
      f"--request: got {request}, which {directory / journal_lib.FILE_NAME} does not hold, expected"
      f" one of its steps {there or 'none'}; correct the numbers."
    )
  recorded = header.fingerprints[entry.epoch]
  here = numerics_lib.fingerprint(config.numerics, config.trainer.remat)
  if recorded != here:
    raise ValueError(
      f"--run: got a request of another numerics fingerprint ({_difference(recorded, here)}),"
      " expected this one's; replay it where its values hold: bits of two numerics may not be"
      " compared."
    )
  return Recorded(
    dataclasses.replace(config, data_parallel_size=1, tensor_parallel_size=1), entry.rollout
  )


def _difference(recorded: Mapping[str, str], here: Mapping[str, str]) -> str:
  return ", ".join(
    f"{field} was {recorded.get(field)!r} and is {here.get(field)!r}"
    for field in sorted(set(recorded) | set(here))
    if recorded.get(field) != here.get(field) and field != "digest"
  )


def masters_of(
  directory: pathlib.Path,
  config: RunConfig,
  policy: Policy,
  version: int,
  say: Callable[[str], Any],
) -> tuple[Any, str]:
  """Returns the f32 master weights of a policy version, and a readable description of their source.

  They are `TrainState.params` of the run after `version` steps: all weights, or the adapters.

  Raises:
    ValueError: if no checkpoint or journal leads to that version under this machine's numerics.
  """
  source = model = f"the model {config.model!r}, as it is now"
  here = numerics_lib.fingerprint(config.numerics, config.trainer.remat)
  trainer = _trainer(config, policy.model)
  kept = [step for step in checkpoint.steps(directory / "checkpoints") if step <= version]
  start = max(kept, default=0)
  if kept:
    restored = checkpoint.restore(
      directory / "checkpoints",
      policy_lib.abstract_state(config.weights, policy, trainer.optimizer, trainer.mesh),
      fingerprint=here,
      step=start,
      # Weights do not depend on numerics; only the steps after them must have used these numerics.
      accept_new_numerics=True,
    )
    state = restored.state
    source = f"checkpoint {start}" + (f" over {model}" if config.lora_rank else "")
  else:
    state = policy_lib.initial_state(config.weights, policy, trainer.optimizer, trainer.mesh)
  steps = range(start, version)
  if not steps:
    return state.params, source

  header, entries = journal_lib.read(directory / journal_lib.FILE_NAME)
  known: dict[tuple[int, int, int], Rollout] = {}
  for entry in entries:
    if entry.step in steps:
      known[entry.step, entry.group, entry.member] = entry.rollout
      if (recorded := header.fingerprints[entry.epoch]) != here:
        raise ValueError(
          f"--request: got one of policy version {version}, whose weights learnt in step"
          f" {entry.step + 1} under another numerics fingerprint ({_difference(recorded, here)}),"
          f" expected this one's from step {start + 1} on, before which the latest weights are"
          " kept; choose a request that was sampled by kept weights, or by such as learnt here."
        )

  def rollout_of(step: int, group: int, member: int) -> Rollout | None:
    return known.get((step, group, member))

  first = programs_lib.base_weights(config.shared, policy)

  def learn(
    state: TrainState, groups: Sequence[RolloutGroup]
  ) -> tuple[TrainState, dict[str, float]]:
    return rl.learn(config, trainer, state, groups, rl.judge(config, groups), first)

  state = replay_lib.learn_again(
    learn,
    config,
    loading.load(config.task, path=config.task_path or None, options=config.task_options),
    policy.with_chat(config.chat).require_tokenizer(),  # Prompts must equal the journal's.
    state,
    steps,
    rollout_of,
    log=say,
  )
  learnt = f"step {version}" if len(steps) == 1 else f"steps {start + 1} to {version}"
  return state.params, f"{source} and {learnt} learnt again"


@functools.lru_cache(maxsize=2)
def _trainer(config: RunConfig, model: model_config.TransformerConfig) -> step_lib.Trainer:
  # Cached, so that several requests of a run compile once.
  return programs_lib.make_programs(config.shared, model).trainer


def running(config: RunConfig, policy: Policy, masters: Any) -> parameters.Params:
  """Returns the weights used for sampling, with adapters attached."""
  base = programs_lib.base_weights(config.shared, policy)
  return policy_lib.running_weights(config.weights, masters, base)


def running_perturbed(
  config: RunConfig, policy: Policy, masters: Any, layer: int
) -> parameters.Params:
  """Returns `running` with a `perturbed` layer; with adapters, the frozen weight is perturbed."""
  if config.lora_rank:
    policy = dataclasses.replace(policy, params=perturbed(policy.params, layer))
    return running(config, policy, masters)
  return running(config, policy, perturbed(masters, layer))


def perturbed(master: parameters.Params, layer: int) -> parameters.Params:
  """Returns the weights with the highest mantissa bit of one entry flipped.

  Args:
    master: f32 master weights.
    layer: 1 to the number of layers; the largest entry of its last matrix is changed.
  """
  layers = master["layers"]
  weight = np.array(layers[layer - 1]["down"])
  bits = weight.view(np.uint32).reshape(-1)
  bits[int(np.argmax(np.abs(weight)))] ^= np.uint32(1 << 22)
  changed = {**layers[layer - 1], "down": jnp.asarray(weight)}
  return {**master, "layers": [*layers[: layer - 1], changed, *layers[layer:]]}


# Two ways to compute a sequence.


def whole_batch(
  tokens: np.ndarray, numerics: numerics_lib.NumericsConfig, page_size: int
) -> tuple[TokenBatch, int]:
  """Returns the rows of one whole sequence (numpy) and the number of pages."""
  batch, num_pages = flax_module.sequences_batch(1, len(tokens), numerics, page_size)
  # Any: the records are typed as device arrays, but this is a host array.
  rows: Any = tokens.astype(np.int32)
  return batch._replace(tokens=rows), num_pages


def row_batch(batch: TokenBatch, position: int) -> TokenBatch:
  """Returns one row of a whole sequence's batch, with the same pages."""
  row = slice(position, position + 1)
  fields: dict[str, Any] = dict(
    tokens=batch.tokens[row],
    positions=batch.positions[row],
    slots=batch.slots[row],
    num_rows=np.int32(1),
    segment_start=np.zeros(1, np.int32),
    segment_length=np.ones(1, np.int32),
    page_table=batch.page_table[:1],
    num_segments=np.int32(1),
  )
  return TokenBatch(**fields)


@functools.cache
def _forward(model: model_config.TransformerConfig, numerics: numerics_lib.NumericsConfig):
  return jax.jit(functools.partial(transformer.forward, decoder=decide(model, numerics)))


def _shortened(params: parameters.Params, depth: int) -> parameters.Params:
  """Returns the weights of the first `depth` layers; the forward pass returns that layer's rows."""
  return {**params, "layers": params["layers"][:depth]}


def _alone(
  model: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  params: parameters.Params,
  tokens: np.ndarray,
) -> tuple[Callable[..., Any], TokenBatch, Any]:
  """Returns the forward pass for the depth of `params`, a sequence's batch, and empty pages."""
  page_size = min(PAGE_SIZE, numerics.kv_split)
  batch, num_pages = whole_batch(tokens, numerics, page_size)
  model = dataclasses.replace(model, layers=model.layers[: len(params["layers"])])
  pages = kv_layout.empty_pages(decide(model, numerics), num_pages=num_pages, page_size=page_size)
  return _forward(model, numerics), batch, pages


def in_one_piece(
  model: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  params: parameters.Params,
  tokens: np.ndarray,
) -> np.ndarray:
  """Returns f[t, d], the hidden states of a sequence computed in one prefill."""
  step, batch, pages = _alone(model, numerics, params, tokens)
  hidden, _ = step(params, jax.tree.map(jnp.asarray, batch), pages)
  return np.asarray(hidden)


def token_by_token(
  model: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  params: parameters.Params,
  tokens: np.ndarray,
) -> np.ndarray:
  """Returns f[t, d], the hidden states of a sequence decoded token by token."""
  step, batch, pages = _alone(model, numerics, params, tokens)
  rows = []
  for position in range(len(tokens)):
    row = jax.tree.map(jnp.asarray, row_batch(batch, position))
    hidden, pages = step(params, row, pages)
    rows.append(np.asarray(hidden)[0])
  return np.stack(rows)


def first_differing_layer(
  model: model_config.TransformerConfig,
  numerics: numerics_lib.NumericsConfig,
  params: parameters.Params,
  other_params: parameters.Params,
  tokens: np.ndarray,
) -> tuple[int, int] | None:
  """Compares `params` in one piece with `other_params` token by token.

  Returns:
    (layer, position) of the first rows that differ, where layer 0 is the embedding and layer l the
    output of the l-th layer; None if all are equal.
  """
  params, other_params = parameters.unstacked(params), parameters.unstacked(other_params)
  for depth in range(len(params["layers"]) + 1):
    if depth == 0:
      left = np.asarray(params["embed"][tokens])
      right = np.asarray(other_params["embed"][tokens])
    else:
      left = in_one_piece(model, numerics, _shortened(params, depth), tokens)
      right = token_by_token(model, numerics, _shortened(other_params, depth), tokens)
    differing = [i for i in range(len(tokens)) if left[i].tobytes() != right[i].tobytes()]
    if differing:
      return depth, differing[0]
  return None


def sample_again(
  recorded: Recorded,
  model: model_config.TransformerConfig,
  params: parameters.Params,
  positions: range,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Samples the tokens at some positions of the completion, each after the journal's tokens.

  Returns:
    (tokens i32[n], log-probabilities f32[n], raw ones f32[n]).
  """
  request, numerics = recorded.rollout.request, recorded.config.numerics
  whole = np.asarray(request.prompt + recorded.rollout.completion.tokens, np.int32)
  start = len(request.prompt)
  hidden = in_one_piece(model, numerics, params, whole[: start + positions[-1]])
  rows = start - 1 + np.asarray(positions)
  count = len(rows)
  drawn_by = penalties.with_penalties(
    sampling.sampling_rows([request.sampling] * count, positions),
    request.sampling,
    request.prompt,
    [recorded.rollout.completion.tokens[:place] for place in positions],
  )

  score = jax.jit(functools.partial(head.sample_and_score, decoder=decide(model, numerics)))
  tokens, scores = score(
    params,
    jnp.asarray(hidden[rows]),
    jnp.full((count,), -1, jnp.int32),
    jax.tree.map(jnp.asarray, drawn_by),
    jnp.full((count,), request.seed, jnp.uint32),
    jnp.asarray(rows + 1, jnp.int32),
    jnp.int32(count),
    numerics_lib.key(recorded.config.seed),
  )
  return np.asarray(tokens), np.asarray(scores.logprob), np.asarray(scores.raw_logprob)


def replay(
  directory: pathlib.Path,
  request: str,
  *,
  token: int | None = None,
  perturb: int | None = None,
  say: Callable[[str], Any] = print,
) -> Finding:
  """Recomputes one token of a request, or all of them.

  Args:
    directory: directory of the run.
    request: "STEP/GROUP/MEMBER".
    token: index in the completion; None for all.
    perturb: a layer; one bit of its weights is flipped first.
    say: receives a line for each step that is trained again.

  Raises:
    ValueError: if the replay is impossible; see `find` and `masters_of`.
  """
  recorded = find(directory, request)
  config, completion = recorded.config, recorded.rollout.completion
  length = len(completion.tokens)
  if token is not None and not 0 <= token < length:
    raise ValueError(
      f"--token: got {token}, expected 0 to {length - 1}, the tokens of request {request}; leave it"
      " away to replay all."
    )
  positions = range(length) if token is None else range(token, token + 1)
  policy = policy_lib.load_policy(config.model, config.numerics)
  model = policy.model
  if perturb is not None and not 1 <= perturb <= model.num_layers:
    raise ValueError(
      f"--perturb: got layer {perturb}, expected 1 to {model.num_layers}; choose another."
    )
  masters, source = masters_of(directory, config, policy, completion.policy_version, say)
  own = running(config, policy, masters)
  params = own if perturb is None else running_perturbed(config, policy, masters, perturb)
  tokens, logprobs, raw = sample_again(recorded, model, params, positions)
  wanted = np.asarray(completion.tokens, np.int32)[list(positions)]
  records = (
    ("token", tokens, wanted),
    ("log-probability", logprobs, completion.behaviour_logprobs[list(positions)]),
    ("raw log-probability", raw, completion.raw_logprobs[list(positions)]),
  )
  places = [
    (place, name, now[i], was[i])
    for i, place in enumerate(positions)
    for name, now, was in records
    if now[i].tobytes() != was[i].tobytes()
  ]
  what = f"request {request}, {len(positions)} of {length} tokens, weights of {source}"
  if not places:
    return Finding(True, f"equal bits: {what}", None)
  place, name, now, was = places[0]
  text = f"other bits: {what}\n{name} of token {place} was {was!s} and is {now!s}"
  sequence = np.asarray(recorded.rollout.request.prompt + completion.tokens, np.int32)
  sequence = sequence[: len(recorded.rollout.request.prompt) + place]
  found = first_differing_layer(model, config.numerics, params, own, sequence)
  if found is None:
    return Finding(
      False,
      f"{text}\nno layer differs between prefill in one piece and token by token: the journal's"
      " bits come from other weights, another key or another sampler than these",
      None,
    )
  layer, position = found
  where = "the embedding" if layer == 0 else f"layer {layer} of {model.num_layers}"
  return Finding(
    False,
    f"{text}\nthe first rows that differ between prefill in one piece and token by token come out"
    f" of {where}, at position {position}",
    layer,
  )


def main(argv: list[str], say: Callable[[str], Any] = print) -> None:
  del argv
  args = flags.FLAGS
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  try:
    xla_flags.pin(say)
    finding = replay(
      pathlib.Path(args.run), args.request, token=args.token, perturb=args.perturb, say=say
    )
  except (ValueError, FileNotFoundError) as error:
    print(error, file=sys.stderr)
    sys.exit(2)
  say(finding.text)
  sys.exit(0 if finding.is_equal else 1)


def define_flags() -> None:
  """Defines the flags of the command."""
  flags.DEFINE_string("run", "runs/grpo", "Run directory.")
  flags.DEFINE_string(
    "request", "0/0/0", "Request as STEP/GROUP/MEMBER, as in the journal, from 0."
  )
  flags.DEFINE_integer("token", None, "Index of a token in the response; all tokens by default.")
  flags.DEFINE_integer("perturb", None, "Flips one bit of this layer's weights; 1 is the first.")
