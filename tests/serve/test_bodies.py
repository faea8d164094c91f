"""Request bodies that are not JSON objects are refused."""

from __future__ import annotations

import pytest
import serving

from seerjax.serve import bodies


@pytest.mark.parametrize(
  "body, expected",
  [
    (b"{", "the body: got invalid JSON"),
    (b"\xff\xfe\x00", "the body: got invalid JSON"),
    (b"[]", "got a JSON list, expected one JSON object"),
    (b'{"a": NaN}', "got NaN, expected a finite number, as JSON requires"),
    (b'{"a": 1, "a": 2}', "got the name 'a' twice in one object"),
    (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "got JSON nested too deeply"),
    (b"[" * 100_000, "got JSON nested too deeply"),
    (b'{"a": ' + b"1" * 10_000 + b"}", "the body: got invalid JSON"),
  ],
)
def test_what_is_no_json_object_is_refused(body: bytes, expected: str):
  assert expected in serving.refusal(bodies.parsed, body).message
