"""Every `raise` of the room, with its message."""

from __future__ import annotations

import dataclasses

import pytest
import refusals
import tiny_model
from word_engine import SIZES, make_engine, request

from seerjax.engine import drafting

pytestmark = pytest.mark.usefixtures("unchecked_annotations")


@refusals.table(
  # Background.
  (lambda: make_engine(dataclasses.replace(SIZES, background_rows=17)),
   "background_rows: got 17, expected at most 16, the rows of"),
  # Checks.
  (lambda: make_engine(tokenizer=None).add_request(request(stop=("x",))),
   "stop without a tokenizer, expected a model that"),
  # Chunks.
  (lambda: make_engine().add_request(request(), kv="a key"),
   "Engine.add_request: kv: got 'a key', expected a KVManifest or"),
  # Drafting.
  (lambda: drafting.accepted([1], [1]), "got 1 samples for a draft of 1 tokens, expected 2"),
  (lambda: drafting.verify([], []), "got 0 paths and 0 lists of samples, expected equal"),
  (lambda: drafting.verify([()], []), "plain decoding is the path ()"),
  # Runner.
  (lambda: tiny_model.runner(tiny_model.NUMERICS).empty_pages(5, 5),
   "page_size: got 5, expected a divisor of kv_split=16"),
)  # fmt: skip
def test_refusals(row):
  refusals.check(row)
