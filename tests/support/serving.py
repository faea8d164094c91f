"""A server and its clients, over a small engine with the vocabulary of the shipped tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
import json
from typing import Any

import httpx2
import pytest
import word_engine

from seerjax.engine.engine import Engine, EngineConfig
from seerjax.models.tokenizer import Tokenizer
from seerjax.serve import server
from seerjax.serve.config import ServeConfig
from seerjax.serve.refusals import Refusal
from seerjax.serve.served import Served
from seerjax.serve.service import Service
from seerjax.serve.vocabulary import Vocabulary
from seerjax.types import Completion, Request, SamplingParams

ANY_PORT = ServeConfig(port=0)
# A user's question; the chat template makes some 20 tokens of it.
HELLO = [{"role": "user", "content": "How many?"}]


def make_service(
  config: ServeConfig = ANY_PORT,
  *,
  sizes: EngineConfig = word_engine.SIZES,
  kind: type[Service] = Service,
  engine_kind: type[Engine] = Engine,
  tokenizer: Tokenizer = word_engine.TOKENIZER,
  **others: Any,
) -> Service:
  """Returns a service of one small model; all tests of a process share its programs."""
  engine = word_engine.make_engine(sizes, tokenizer=tokenizer, kind=engine_kind)
  tiny = Served(name="tiny", engine=engine, fingerprint="fp_test")
  return kind({"tiny": tiny}, config, **others)


@functools.cache
def make_vocabulary() -> Vocabulary:
  return Vocabulary(word_engine.TOKENIZER)


@contextlib.contextmanager
def running(config: ServeConfig = ANY_PORT, **others: Any) -> Iterator[tuple[Service, str]]:
  """Runs a server, and yields the service and its URL."""
  service = make_service(config, **others)
  with server.running(service) as url:
    yield service, url


@contextlib.contextmanager
def client(url: str, **others: Any) -> Iterator[httpx2.Client]:
  with httpx2.Client(base_url=url, timeout=300, trust_env=False, **others) as found:
    yield found


def pieces(text: str) -> list[dict[str, Any]]:
  """Returns the pieces of a stream, and checks its end marker."""
  lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
  assert lines[-1] == "[DONE]", lines[-1]
  return [json.loads(line) for line in lines[:-1]]


def refusal(ask: Callable[..., Any], *arguments: Any, **fields: Any) -> Refusal:
  """Returns the refusal of a call, which has to be refused."""
  with pytest.raises(Refusal) as caught:
    ask(*arguments, **fields)
  return caught.value


def engine_alone() -> Engine:
  """Returns an engine with other sizes, for one request at a time."""
  return word_engine.make_engine(
    EngineConfig(
      page_size=16, num_pages=5, max_num_seqs=1, max_model_len=64, batch_size_buckets=(16,)
    )
  )


def answer_alone(
  engine: Engine, prompt: tuple[int, ...], seed: int, sampling: SamplingParams
) -> Completion:
  """Returns an engine's completion of a request that runs alone."""
  request = Request(request_id="alone", prompt=prompt, sampling=sampling, seed=seed)
  return engine.generate([request])[0]
