"""Drawn models behind a server, drawn requests of many clients, and the response to each alone.

    draw(seed, number) -> Case --> `alone`: an otherwise idle server, one choice at a time
                               --> `load`: all clients at once, over a constantly disturbed engine

A case follows from the seed and the number; `load` runs it and compares every choice.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import time
from typing import Any, NamedTuple

import drawn_models
import jax
import jax.numpy as jnp
from made_drafters import Observed
import numpy as np
import openai
from seen_inputs import SeesInputs
import word_engine

from seerjax import numerics as numerics_lib, parallel
from seerjax.engine import runner as runner_lib, texts
from seerjax.engine.engine import Engine, EngineConfig
from seerjax.kv.pool import KVPool, KVPoolConfig
from seerjax.models import adapters as adapters_lib, loading, lora
from seerjax.models.decoder import decide
from seerjax.serve import identity, server
from seerjax.serve.config import ServeConfig
from seerjax.serve.served import Served
from seerjax.serve.service import Service

CONTEXT = 128
ADAPTERS = ("poet", "judge", "clerk")
CONFIG = ServeConfig(port=0, max_queued_requests=4096, max_waiting_of_client=1024)
REGEXES = ("[a-c]{2}[0-9]{3}", "(yes|no), because [a-z ]{1,9}", "[0-9]{1,12}")
SCHEMAS: tuple[dict[str, Any], ...] = (
  {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
   "additionalProperties": False},
  {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
)  # fmt: skip
WORDS = (
  "How",
  "many",
  "apples?",
  "two",
  "and",
  "17",
  "+",
  "4",
  "=",
  "why",
  "<|im_end|>",
  "café",
  "box",
)
KEY = numerics_lib.key(11)
# Fields of a body for which OpenAI's client has no parameter.
EXTRA = ("top_k", "min_p", "regex", "stop_token_ids", "prompt_logprobs")


# Models.


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
  """A model with its adapters, and the objects that all servers of a case share.

  Attributes:
    name: the base model's name in requests.
    model: the base, with its tokenizer.
    adapters: adapters by their names in requests.
    alone: by all these names, a model with that adapter only.
  """

  name: str
  model: loading.Model
  adapters: Mapping[str, adapters_lib.Scaled]
  alone: Mapping[str, loading.Model]

  def __str__(self) -> str:
    config, numerics = self.model.config, self.model.numerics
    return (
      f"{self.name}: {config.num_layers} layers, hidden {config.hidden_size}, vocabulary"
      f" {config.vocab_size}, {numerics.backend} {numerics.compute_dtype}"
    )


@functools.lru_cache(maxsize=2)
def subject(kind: str, backend: Any, seed: int, number: int) -> Subject:
  """Returns nano, or a tiny model of odd sizes with nano's vocabulary."""
  rng = np.random.default_rng((seed, number, 0))
  if kind == "nano":
    dtype = ("float32", "bfloat16")[int(rng.integers(2))]
    numerics = numerics_lib.NumericsConfig(backend=backend, compute_dtype=dtype)
    model = loading.load_model("nano", numerics)
  else:
    drawn = drawn_models.draw_model(rng)
    slabs = drawn.numerics.reduction_shards
    vocab_size = slabs * (512 // slabs + 1 + 2 * int(rng.integers(10)))  # Odd in every slab.
    config = dataclasses.replace(drawn.config, vocab_size=vocab_size, max_model_len=CONTEXT)
    numerics = dataclasses.replace(drawn.numerics, backend=backend)
    drawn = dataclasses.replace(drawn, config=config, numerics=numerics, rank=0)
    params = drawn_models.params_of(drawn)
    model = loading.Model(config, params, numerics, word_engine.TOKENIZER)
  adapters = draw_adapters(rng, model)
  alone = {kind: model} | {
    name: dataclasses.replace(model, params=lora.attach(model.params, *scaled))
    for name, scaled in adapters.items()
  }
  return Subject(kind, model, adapters, alone)


def draw_adapters(
  rng: np.random.Generator, model: loading.Model
) -> Mapping[str, adapters_lib.Scaled]:
  """Returns three adapters with various ranks (one has rank 1), targets and scales."""
  found = {}
  for name, rank in zip(ADAPTERS, (1, 2, int(rng.integers(1, 9))), strict=True):
    targets = tuple(target for target in lora.TARGETS if rng.random() < 0.6) or lora.TARGETS
    shapes = lora.shapes(model.config, model.numerics, rank, targets)
    leaf = lambda shape: jnp.asarray(0.1 * rng.standard_normal(shape.shape), jnp.float32)
    found[name] = jax.tree.map(leaf, shapes), float(rng.choice([0.5, 1.0, 2.0]))
  return found


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of one server's engine."""

  engine: EngineConfig
  mesh: tuple[int, int] = (1, 1)
  host_pages: int = 0


def alone_sizes(model: loading.Model) -> Sizes:
  """Returns sizes for a single request, without prefix reuse."""
  page_size = min(model.numerics.kv_split, 16)
  return Sizes(
    EngineConfig(
      page_size=page_size,
      num_pages=1 - CONTEXT // -page_size,
      max_num_seqs=1,
      max_model_len=CONTEXT,
      batch_size_buckets=(48,),
      decode_steps_per_call=1,
      enable_prefix_caching=False,
    )
  )


def draw_sizes(rng: np.random.Generator, model: loading.Model) -> Sizes:
  """Returns sizes with little memory, rows that no tile divides, and one to three instances."""
  pick = lambda *choices: choices[int(rng.integers(len(choices)))]
  # Several pages per request, so that requests can reuse each other's pages.
  split, slabs = min(model.numerics.kv_split, 32), model.numerics.reduction_shards
  page_size = split >> pick(*(p for p in (0, 1, 2, 3) if split >> p))
  last = int(rng.integers(12, 41))
  buckets = (int(rng.integers(3, 12)), last) if rng.random() < 0.3 else (last,)
  instances = pick(1, 1, 2, 3)
  return Sizes(
    EngineConfig(
      page_size=page_size,
      num_pages=1 + int(-(CONTEXT // -page_size) * pick(1.0, 1.5, 2.5)),
      max_num_seqs=int(rng.integers(3, 9)),
      max_model_len=CONTEXT,
      batch_size_buckets=buckets,
      decode_steps_per_call=pick(1, 3, 8),
    ),
    mesh=(instances, pick(*(s for s in (1, 1, 2) if slabs % s == 0))),
    host_pages=pick(8, 64),
  )


@functools.lru_cache(maxsize=8)
def _runner(of: Subject, sizes: Sizes, alone: str = "") -> runner_lib.Runner:
  instances, shards = sizes.mesh
  mesh = parallel.make_mesh(data_parallel_size=instances, tensor_parallel_size=shards)
  config, numerics = of.model.config, of.model.numerics
  return runner_lib.Runner(
    decide(config, numerics), mesh, max_programs=len(sizes.engine.batch_size_buckets)
  )


@contextlib.contextmanager
def serving(
  of: Subject, sizes: Sizes, make: Callable[..., Engine] = Engine, **others: Any
) -> Iterator[tuple[Service, str]]:
  """Serves a fresh engine with all adapters, and yields the service and its URL."""
  engine = make(
    of.model,
    config=sizes.engine,
    key=KEY,
    runner=_runner(of, sizes),
    kv_pool=KVPool(KVPoolConfig(host_pages=sizes.host_pages)) if sizes.host_pages else None,
    adapters=of.adapters,
    **others,
  )
  base = _served(of, of.name, engine)
  models = {name: _served(of, name, engine, parent=base) for name in of.adapters}
  service = Service({of.name: base, **models}, CONFIG)
  with server.running(service) as url:
    yield service, url


def _served(of: Subject, name: str, engine: Engine, parent: Served | None = None) -> Served:
  return Served(
    name=name,
    engine=engine,
    fingerprint=identity.fingerprint(of.alone[name], KEY),
    parent=parent,
  )


# Engines and their disturbances.


class Knowing(Observed):
  """Drafts known completions of equal prompts, some of them altered."""

  def __init__(self, known: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], seed: int):
    super().__init__()
    self._rng = np.random.default_rng(seed)
    self._answers: dict[tuple[int, ...], list[tuple[int, ...]]] = collections.defaultdict(list)
    for prompt, answer in known:
      self._answers[prompt].append(answer)

  def draft(self, queries):
    return [self._paths(query) for query in queries]

  def _paths(self, query) -> list[tuple[int, ...]]:
    rng, prompt = self._rng, tuple(query.tokens[: query.num_prompt])
    prefix = tuple(query.tokens[query.num_prompt :])
    paths: list[tuple[int, ...]] = []
    for answer in self._answers.get(prompt, ()):
      if answer[: len(prefix)] == prefix:
        path = list(answer[len(prefix) :][: int(rng.integers(1, 7))])
        if path and rng.random() < 0.3:
          path[int(rng.integers(len(path)))] = int(rng.integers(512))
        paths.append(tuple(path))
    order = rng.permutation(len(paths))[:3]
    return [paths[place] for place in order if paths[place]]


class Restless(SeesInputs):
  """An engine that is disturbed before each visit in every way that must not change a bit: requests
  end a chunk, are paused, spilled, migrated or lose their pages, and steps fail."""

  def __init__(self, *args, rng, events, **others):
    super().__init__(*args, **others)
    self.rng, self.events = rng, events
    self.others_wait: Callable[[], bool] = lambda: False
    self._idle = 0
    self._has_broken = False
    self._withheld: list[tuple[Any, list[int], int]] = []  # (pool, pages, visits left).

  def add_request(self, request, **others):
    super().add_request(request, **others, chunk_tokens=self._chunk())

  def abort_request(self, request_id):
    super().abort_request(request_id)
    self.events["cancelled"] += 1

  def _chunk(self) -> int | None:
    return (None, None, 2, 5, 9)[int(self.rng.integers(5))]

  def _chance(self, rate: float) -> bool:
    return bool(self.rng.random() < rate)

  def step(self):
    self._disturb()
    self.events["visits while clients wait"] += self.others_wait()
    before = self.counters.steps
    updates = super().step()
    self.events["visits of several steps"] += self.counters.steps - before > 1
    self._idle = 0 if updates else self._idle + 1
    self._has_broken = False
    return updates

  def give_back_withheld(self, visits: int) -> None:
    """Releases withheld pages after their number of visits."""
    kept = []
    for pool, pages, left in self._withheld:
      if left > visits:
        kept.append((pool, pages, left - visits))
      else:
        for page in pages:
          pool.release(page)
    self._withheld = kept

  def _disturb(self) -> None:
    self.give_back_withheld(1)
    for pool in self.memory.pools:
      if self._chance(0.03):
        pages = pool.take(pool.num_available)
        self._withheld.append((pool, pages, int(self.rng.integers(1, 9))))
        self.events["pages withheld"] += len(pages)
    paused = set(self.chunks.poll_paused())
    for name in sorted(paused):
      if self._chance(0.3):
        self.events["spilled"] += len(self.chunks.spill([name]))
      elif self.data_parallel_size > 1 and self._chance(0.3):
        place = int(self.rng.integers(self.data_parallel_size))
        is_other = place != self.chunks.instance_of(name)
        self.events["migrated"] += self.chunks.migrate(name, place) and is_other
    for name in sorted(paused):
      if self._idle > 20 or self._chance(0.4):
        self.chunks.resume(name, chunk_tokens=self._chunk())
        self.events["resumed"] += 1
    names = sorted(self._requests.live)
    for name in names:
      if name not in paused and self._chance(0.02):
        self.chunks.pause(name)
        self.events["paused"] += 1
      elif self._chance(0.02):
        before = self.counters.preemptions
        self.chunks.preempt(name)
        self.events["preempted"] += self.counters.preemptions - before
    holding = [name for name in names if self.chunks.held_pages(name)]
    if self._idle > 40 and holding:  # They hold the pages that the others need.
      self.chunks.preempt(holding[-1])
      self._idle = 0

  def _inputs(self, scheduled):
    masked = [p for pieces in scheduled for p in pieces if p.is_sampled and p.sequence.mask]
    self.events["masked rows"] += len(masked)
    inputs = super()._inputs(scheduled)
    for rows, count in zip(inputs.adapters, inputs.batch.num_rows, strict=True):
      self.events["steps of several adapters"] += len(set(rows[:count].tolist())) > 1
    if not self._has_broken and self._chance(0.03):
      self._has_broken = True
      self._withheld = []  # The failed step frees all pages.
      self.events["steps broken off"] += 1
      raise OSError("a device fails, as was drawn")
    return inputs

  def count(self) -> None:
    """Adds the engine's counters; called once, when the engine ends."""
    for event, field in (
      ("waits for pages", "waits"), ("positions reused", "reused_tokens"),
      ("pages copied", "page_copies"), ("drafted tokens", "drafted_tokens"),
      ("drafts adopted", "accepted_tokens"), ("side paths", "side_paths"), ("steps", "steps"),
      ("came back", "restored_pages"), ("sampled tokens", "sampled_tokens"),
    ):  # fmt: skip
      self.events[event] += getattr(self.counters, field)


class Seedless(Restless):
  """Twin: pages are found by prompt and position, whatever tokens the seed sampled."""

  def __init__(self, *args, **others):
    super().__init__(*args, **others)
    self._prompts: set[tuple[int, ...]] = set()
    find, remember = self.memory.find, self.memory.remember
    self.memory.find = lambda place, tokens: find(place, self._blind(tokens))
    self.memory.remember = lambda sequence, tokens: remember(sequence, self._blind(tokens))

  def add_request(self, request, **others):
    self._prompts.add(request.prompt)
    super().add_request(request, **others)

  def _blind(self, tokens):
    known = [len(p) for p in self._prompts if p == tuple(tokens[: len(p)])]
    end = max(known, default=len(tokens))
    return [*tokens[:end], *[0] * (len(tokens) - end)]


class Neighbourly(Restless):
  """Twin: a row's mask applies to the neighbouring row."""

  def _inputs(self, scheduled):
    inputs = super()._inputs(scheduled)
    sampling = inputs.sampling
    if sampling.mask is None:
      return inputs
    for place, count in enumerate(inputs.num_samples):
      for leaf in (sampling.mask, sampling.high):
        leaf[place, :count] = np.roll(leaf[place, :count], 1, axis=0)
    return inputs


# Requests.


class Ask(NamedTuple):
  """One request of one client.

  Attributes:
    client: the client's number.
    model: name of the base or an adapter.
    is_chat: whether the chat route is used.
    body: the request body.
    wait: seconds before the request is sent.
    leaves_after: pieces after which the client disconnects, None if it stays.
  """

  client: int
  model: str
  is_chat: bool
  body: dict[str, Any]
  wait: float
  leaves_after: int | None

  @property
  def num_prompts(self) -> int:
    prompt = self.body.get("prompt", "")
    return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], list) else 1

  @property
  def num_choices(self) -> int:
    return self.num_prompts * self.body.get("n", 1)

  def of_choice(self, choice: int, seed: int) -> dict[str, Any]:
    """Returns the body that requests one choice alone."""
    body = {name: value for name, value in self.body.items() if not name.startswith("stream")}
    body |= dict(n=1, seed=seed)
    if self.num_prompts > 1:
      body["prompt"] = body["prompt"][choice // self.body.get("n", 1)]
    return body


class Response(NamedTuple):
  """One choice, in the same form for streams and whole bodies.

  Attributes:
    text: the choice's text.
    finish_reason: why the choice ended.
    rows: per token the id, both log-probabilities and the alternatives; () if not requested.
    prompt: scores of the prompt, if requested.
  """

  text: str
  finish_reason: str | None
  rows: tuple[tuple[Any, ...], ...]
  prompt: Any


def draw_asks(
  rng: np.random.Generator, names: Sequence[str], vocab_size: int, clients: int, each: int
) -> tuple[Ask, ...]:
  """Returns the requests of all clients; prompts are few, so that many share a prefix."""
  pick = lambda *choices: choices[int(rng.integers(len(choices)))]
  words = lambda most: " ".join(rng.choice(WORDS, int(rng.integers(1, most + 1))).tolist())
  ids = lambda most: rng.integers(3, 500, int(rng.integers(1, most + 1))).tolist()
  user = lambda: {"role": "user", "content": words(5)}
  chats = [
    pick([user()], [{"role": "system", "content": words(3)}, user()],
         [user(), {"role": "assistant", "content": words(3)}, user()])
    for _ in range(max(2, clients // 6))
  ]  # fmt: skip
  start = ids(40)
  prompts = [pick(words(9), ids(30), start + ids(9)) for _ in range(max(2, clients // 6))]
  asks = []
  for client in range(clients):
    for _ in range(each):
      is_chat, is_streamed = rng.random() < 0.5, rng.random() < 0.5
      body: dict[str, Any] = dict(
        max_tokens=int(rng.integers(1, 25)),
        temperature=pick(1.0, 1.0, 0.0, 0.6, 1.7),
        user=f"client {client}",
        stream=is_streamed,
      )
      chance = lambda rate: rng.random() < rate
      if chance(0.85):
        body["seed"] = int(rng.integers(2**32))
      if chance(0.3):
        body["n"] = pick(2, 3)
      if chance(0.3):
        body |= pick({"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.5, "top_k": 20})
      if chance(0.25):
        biased = rng.choice(vocab_size, 3, replace=False).tolist()
        body["logit_bias"] = {str(token): float(rng.uniform(-6, 6)) for token in biased}
      if chance(0.3):
        body["stop"] = [pick("e", "o", " a", "10", "in"), pick("th", "3")]
      if chance(0.2):
        body["stop_token_ids"] = rng.integers(3, 500, 12).tolist()
      if chance(0.2):
        body |= pick(
          {"regex": pick(*REGEXES)},
          {"response_format": {"type": "json_object"}},
          {"response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": pick(*SCHEMAS)}
          }},
        )  # fmt: skip
      num_top = pick(0, 0, 1, 5, 16)
      if is_chat:
        body["messages"] = pick(*chats)
        if chance(0.9):
          body["logprobs"] = True
          if num_top:
            body["top_logprobs"] = num_top
      else:
        body["prompt"] = pick(*prompts)
        if chance(0.1):
          body["prompt"] = [ids(9), ids(20)]
        if chance(0.9):
          body["logprobs"] = num_top
        if chance(0.15):
          body["echo"] = True
      if chance(0.1):
        body["prompt_logprobs"] = pick(0, 3)
      if is_streamed and chance(0.5):
        body["stream_options"] = {"include_usage": True}
      leaves = int(rng.integers(1, 6)) if is_streamed and chance(0.2) else None
      wait, model = float(rng.exponential(0.02)), pick(names[0], *names)
      asks.append(Ask(client, model, is_chat, body, wait, leaves))
  return tuple(asks)


def _split(body: Mapping[str, Any], model: str, is_chat: bool) -> dict[str, Any]:
  others = EXTRA if is_chat else (*EXTRA, "response_format")
  plain = {name: value for name, value in body.items() if name not in others}
  extra = {name: value for name, value in body.items() if name in others}
  return dict(model=model, **plain, extra_body=extra)


def _rows_of(choice: Mapping[str, Any], is_chat: bool) -> list[tuple[Any, ...]]:
  logprobs = choice.get("logprobs")
  if logprobs is None:
    return []
  if is_chat:
    return [
      (
        row["token_id"], row["token"], row["logprob"], row["raw_logprob"],
        tuple((top["token_id"], top["logprob"]) for top in row["top_logprobs"]),
      )
      for row in logprobs["content"]
    ]  # fmt: skip
  tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
  columns = (logprobs[name] for name in (
    "token_ids", "tokens", "token_logprobs", "raw_logprobs", "text_offset"))  # fmt: skip
  tops = [None if top is None else tuple(top.items()) for top in tops]
  return [*zip(*columns, tops, strict=True)]


def responses_of(
  bodies: Sequence[Mapping[str, Any]], is_chat: bool
) -> dict[int, tuple[int, Response]]:
  """Returns (seed, `Response`) by choice, of a whole body or a stream's pieces."""
  found: dict[int, list[Mapping[str, Any]]] = collections.defaultdict(list)
  for body in bodies:
    for choice in body["choices"]:
      found[choice["index"]].append(choice)
  responses = {}
  for index, parts in found.items():
    message = [part.get("message") or part.get("delta") or part for part in parts]
    text = "".join(one.get("content" if is_chat else "text") or "" for one in message)
    rows = tuple(row for part in parts for row in _rows_of(part, is_chat))
    prompt = parts[0].get("prompt_logprobs")
    responses[index] = (
      parts[0]["seed"],
      Response(text, parts[-1].get("finish_reason"), rows, prompt),
    )
  return responses


async def answered(
  client: openai.AsyncOpenAI, ask: Ask
) -> tuple[dict[int, tuple[int, Response]], bool]:
  """Sends a request over HTTP; returns what came by choice, and whether all of it came."""
  create = client.chat.completions.create if ask.is_chat else client.completions.create
  asked = _split(ask.body, ask.model, ask.is_chat)
  if not ask.body.get("stream"):
    return responses_of([(await create(**asked)).model_dump()], ask.is_chat), True
  bodies, is_whole = [], True
  stream = await create(**asked)
  async with contextlib.aclosing(stream.__aiter__()):
    async for piece in stream:
      bodies.append(piece.model_dump())
      if ask.leaves_after is not None and len(bodies) >= ask.leaves_after:
        is_whole = False
        break
  if not is_whole:
    await stream.close()
  return responses_of(bodies, ask.is_chat), is_whole


# Cases.


@dataclasses.dataclass(frozen=True)
class Case:
  """One case: the served model, the requests and the engine's sizes."""

  subject: Subject
  sizes: Sizes
  asks: tuple[Ask, ...]
  seed: int
  number: int

  def __str__(self) -> str:
    return f"case {self.number} of seed {self.seed}: {self.subject}; {self.sizes}"


def draw(seed: int, number: int, *, of: Subject, clients: int, each: int) -> Case:
  """Returns the case of a number: its sizes and its requests."""
  rng = np.random.default_rng((seed, number, 1))
  names = (of.name, *of.adapters)
  asks = draw_asks(rng, names, of.model.config.vocab_size, clients, each)
  return Case(of, draw_sizes(rng, of.model), asks, seed, number)


class Alone:
  """The choices of a case alone, from an otherwise idle server, requested one at a time."""

  def __init__(self, case: Case, url: str, client: openai.OpenAI):
    self._case, self._url, self._client = case, url, client
    self._found: dict[str, Response] = {}

  def response(self, ask: Ask, choice: int, seed: int) -> Response:
    body = ask.of_choice(choice, seed)
    name = repr((ask.model, sorted(body.items(), key=lambda item: item[0])))
    if name not in self._found:
      routes = self._client.chat.completions if ask.is_chat else self._client.completions
      answer = routes.create(**_split(body, ask.model, ask.is_chat)).model_dump()
      ((own, response),) = responses_of([answer], ask.is_chat).values()
      assert own == seed
      self._found[name] = response
    return self._found[name]


@contextlib.contextmanager
def alone(case: Case) -> Iterator[Alone]:
  """Yields the case's choices alone, from a fresh server with other sizes.

  There each adapter has its own engine; its weights include no other adapter.
  """
  of, sizes = case.subject, alone_sizes(case.subject.model)
  assert sizes.engine != case.sizes.engine
  engines = {
    name: Engine(model, config=sizes.engine, key=KEY, runner=_runner(of, sizes, name))
    for name, model in of.alone.items()
  }
  models = {name: _served(of, name, engine) for name, engine in engines.items()}
  with (
    server.running(Service(models, CONFIG)) as url,
    openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=1800) as client,
  ):
    yield Alone(case, url, client)


def load(
  case: Case,
  asked_alone: Alone,
  events: collections.Counter[str],
  make: type[Restless] = Restless,
) -> int:
  """Sends all requests at once, compares every choice with its reference, and returns the count."""
  known = [_known(case, ask, asked_alone) for ask in case.asks if "seed" in ask.body]
  drafter = Knowing([one for some in known for one in some], case.number)
  rng = np.random.default_rng((case.seed, case.number, 2))
  with serving(case.subject, case.sizes, make, rng=rng, events=events, drafter=drafter) as (
    service,
    url,
  ):
    engine: Any = service.models[case.subject.name].engine
    engine.others_wait = lambda: service.thread.num_waiting > 0
    found = asyncio.run(_all_at_once(case, url))
    until = time.monotonic() + 60
    while service.thread.num_running or service.thread.num_waiting:
      assert time.monotonic() < until, "clients that left are still answered after 60 s"
      time.sleep(0.01)
    engine.count()
    engine.give_back_withheld(100)
    free = [engine.chunks.free_pages(place) for place in range(engine.data_parallel_size)]
    assert free == [engine.config.num_pages - 1] * engine.data_parallel_size
    assert engine.memory.kv_pool.num_host_pages == 0
  return sum(
    _compare(case, ask, choices, is_whole, asked_alone, events)
    for ask, (choices, is_whole) in zip(case.asks, found, strict=True)
  )


def _known(case: Case, ask: Ask, asked_alone: Alone) -> list[tuple[Any, Any]]:
  """Returns (prompt, completion) of choices with reported tokens, for the drafter."""
  tokenizer, found = case.subject.model.tokenizer, []
  for choice in range(ask.num_choices):
    seed = texts.seed_at(ask.body["seed"], *divmod(choice, ask.body.get("n", 1)))
    response = asked_alone.response(ask, choice, seed)
    answer = tuple(row[0] for row in response.rows)
    if ask.is_chat:
      found.append((tuple(tokenizer.chat_ids(ask.body["messages"])), answer))
    elif isinstance(ask.body["prompt"], str) and not ask.body.get("echo"):
      found.append((tuple(tokenizer.encode(ask.body["prompt"])), answer))
  return [(prompt, answer) for prompt, answer in found if answer]


async def _all_at_once(case: Case, url: str) -> list[tuple[dict[int, tuple[int, Response]], bool]]:
  found: dict[int, Any] = {}
  of_client: dict[int, list[int]] = collections.defaultdict(list)
  for place, ask in enumerate(case.asks):
    of_client[ask.client].append(place)

  async def be(places: list[int]) -> None:
    for place in places:
      await asyncio.sleep(case.asks[place].wait)
      found[place] = await answered(client, case.asks[place])

  async with openai.AsyncOpenAI(
    base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=1800
  ) as client:
    await asyncio.gather(*(be(places) for places in of_client.values()))
  return [found[place] for place in range(len(case.asks))]


def _compare(
  case: Case,
  ask: Ask,
  choices: Mapping[int, tuple[int, Response]],
  is_whole: bool,
  asked_alone: Alone,
  events: collections.Counter[str],
) -> int:
  body = ask.body
  if is_whole:
    assert sorted(choices) == [*range(ask.num_choices)], f"{case}: {ask}: got {sorted(choices)}"
  for choice, (seed, response) in choices.items():
    if "seed" in body:
      assert seed == texts.seed_at(body["seed"], *divmod(choice, body.get("n", 1)))
    wanted = asked_alone.response(ask, choice, seed)
    got = response
    if not is_whole:  # Compare the part that arrived.
      count = len(response.rows)
      assert wanted.text.startswith(response.text), (
        f"{case}: {ask}: got {response}, expected {wanted}"
      )
      wanted = wanted._replace(text=response.text, rows=wanted.rows[:count])
      got = response._replace(finish_reason=wanted.finish_reason)
    assert got == wanted, f"{case}: {ask}, choice {choice}: got {got}, expected {wanted}"
    events["tokens compared"] += len(response.rows)
    events["answers"] += is_whole
    events["answers that were left"] += not is_whole
    if is_whole:
      events[f"ended by {response.finish_reason}"] += 1
    events["streamed"] += bool(body.get("stream"))
    events["whole"] += not body.get("stream")
    events["chats" if ask.is_chat else "completions"] += 1
    events["siblings"] += ask.num_choices > 1
    events["of the base" if ask.model == case.subject.name else "of an adapter"] += 1
    events["without a seed"] += "seed" not in body
    events["greedy"] += body["temperature"] == 0
    events["filtered"] += any(name in body for name in ("top_k", "top_p", "min_p"))
    events["biased"] += "logit_bias" in body
    events["stop strings"] += "stop" in body
    events["with a form"] += "regex" in body or "response_format" in body
    events["other tokens named"] += bool(response.rows and response.rows[-1][-1])
    events["prompts scored"] += response.prompt is not None
    events["echoed"] += bool(body.get("echo"))
  return len(choices) if is_whole else 0


EVENTS = (
  "answers", "streamed", "whole", "chats", "completions", "siblings", "without a seed", "greedy",
  "filtered", "biased", "ended by stop", "ended by length", "stop strings", "with a form",
  "masked rows", "of the base", "of an adapter", "steps of several adapters",
  "other tokens named", "prompts scored", "echoed", "cancelled",
  "answers that were left", "paused", "resumed", "preempted", "spilled", "came back",
  "waits for pages", "visits while clients wait", "positions reused", "pages copied",
  "drafted tokens", "drafts adopted", "steps broken off",
)  # fmt: skip
