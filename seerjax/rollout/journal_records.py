"""Rollouts and their chunks as JSON values, restored bit by bit.

Log-probabilities are base64 of little-endian float32, so that no bit is lost; token ids are plain
numbers, so that they are readable.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import numpy as np

from seerjax.types import PENALTIES, Completion, Request, Rollout, SamplingParams, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """A finished chunk of an unfinished rollout.

  Attributes:
    request: the request.
    start: index of the chunk's first token among the generated ones.
    tokens: generated ids of this chunk.
    behaviour_logprobs: f32[t], nats, as in `Completion`.
    raw_logprobs: f32[t], nats, as in `Completion`.
    policy_version: version of the weights that sampled every token.
  """

  request: Request
  start: int
  tokens: tuple[int, ...]
  behaviour_logprobs: np.ndarray
  raw_logprobs: np.ndarray
  policy_version: int


def to_record(rollout: Rollout) -> dict[str, Any]:
  """Returns `rollout` as JSON values; `from_record` restores it bit by bit."""
  completion, verdict = rollout.completion, rollout.verdict
  return {
    "request": _request_record(rollout.request),
    "completion": {
      "request_id": completion.request_id,
      "tokens": [int(token) for token in completion.tokens],
      "behaviour_logprobs": _floats_text(completion.behaviour_logprobs, "behaviour_logprobs"),
      "raw_logprobs": _floats_text(completion.raw_logprobs, "raw_logprobs"),
      "text": completion.text,
      "finish_reason": completion.finish_reason,
      "policy_version": int(completion.policy_version),
    },
    "verdict": {
      "reward": _number(verdict.reward),
      "correct": bool(verdict.correct),
      "well_formed": bool(verdict.well_formed),
      "answer": verdict.answer,
    }
    | ({"parts": {k: _number(v) for k, v in verdict.parts.items()}} if verdict.parts else {}),
  }


def from_record(record: Mapping[str, Any]) -> Rollout:
  """Returns the rollout of a record from `to_record`."""
  completion, verdict = record["completion"], record["verdict"]
  return Rollout(
    request=_request(record["request"]),
    completion=Completion(
      request_id=completion["request_id"],
      tokens=tuple(completion["tokens"]),
      behaviour_logprobs=_floats(completion["behaviour_logprobs"]),
      raw_logprobs=_floats(completion["raw_logprobs"]),
      text=completion["text"],
      finish_reason=completion["finish_reason"],
      policy_version=completion["policy_version"],
    ),
    verdict=Verdict(
      reward=float(verdict["reward"]),
      correct=verdict["correct"],
      well_formed=verdict["well_formed"],
      answer=verdict["answer"],
      parts={name: float(value) for name, value in verdict.get("parts", {}).items()},
    ),
  )


def _request_record(request: Request) -> dict[str, Any]:
  sampling = request.sampling
  return {
    "request_id": request.request_id,
    "prompt": [int(token) for token in request.prompt],
    "seed": int(request.seed),
    "group_id": request.group_id,
    "sampling": {
      "temperature": _number(sampling.temperature),
      "top_k": int(sampling.top_k),
      "top_p": _number(sampling.top_p),
      "min_p": _number(sampling.min_p),
      **{name: _number(vars(sampling)[name]) for name in PENALTIES if sampling.has_penalties},
      "logit_bias": [[int(token), _number(bias)] for token, bias in sampling.logit_bias],
      "allowed_token_ranges": [
        [int(low), int(high)] for low, high in sampling.allowed_token_ranges
      ],
      "max_tokens": int(sampling.max_tokens),
      "stop_token_ids": [int(token) for token in sampling.stop_token_ids],
      "stop": list(sampling.stop),
    },
  }


def _request(record: Mapping[str, Any]) -> Request:
  sampling = record["sampling"]
  return Request(
    request_id=record["request_id"],
    prompt=tuple(record["prompt"]),
    seed=record["seed"],
    group_id=record["group_id"],
    sampling=SamplingParams(
      temperature=float(sampling["temperature"]),
      top_k=sampling["top_k"],
      top_p=float(sampling["top_p"]),
      min_p=float(sampling["min_p"]),
      **{name: float(sampling[name]) for name in PENALTIES if name in sampling},
      logit_bias=tuple((token, float(bias)) for token, bias in sampling["logit_bias"]),
      allowed_token_ranges=tuple((low, high) for low, high in sampling["allowed_token_ranges"]),
      max_tokens=sampling["max_tokens"],
      stop_token_ids=tuple(sampling["stop_token_ids"]),
      stop=tuple(sampling["stop"]),
    ),
  )


def chunk_to_record(chunk: Chunk) -> dict[str, Any]:
  """Returns `chunk` as JSON values; `chunk_from_record` restores it bit by bit."""
  return {
    "request": _request_record(chunk.request),
    "start": int(chunk.start),
    "tokens": [int(token) for token in chunk.tokens],
    "behaviour_logprobs": _floats_text(chunk.behaviour_logprobs, "behaviour_logprobs"),
    "raw_logprobs": _floats_text(chunk.raw_logprobs, "raw_logprobs"),
    "policy_version": int(chunk.policy_version),
  }


def chunk_from_record(record: Mapping[str, Any]) -> Chunk:
  """Returns the chunk of a record from `chunk_to_record`."""
  return Chunk(
    request=_request(record["request"]),
    start=record["start"],
    tokens=tuple(record["tokens"]),
    behaviour_logprobs=_floats(record["behaviour_logprobs"]),
    raw_logprobs=_floats(record["raw_logprobs"]),
    policy_version=record["policy_version"],
  )


def _number(value: float) -> float | str:
  # JSON has no infinity, and -inf is the usual bias of a forbidden token; float() parses these
  # strings.
  value = float(value)
  return value if math.isfinite(value) else repr(value)


def _floats_text(values: np.ndarray, name: str) -> str:
  array = np.asarray(values)
  if array.dtype != np.float32 or array.ndim != 1:
    raise ValueError(
      f"journal: got {name} of dtype {array.dtype} and shape {array.shape}, expected float32[t];"
      " store the engine's array, without a cast."
    )
  return base64.b64encode(array.astype("<f4").tobytes()).decode()


def _floats(text: str) -> np.ndarray:
  return np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)
