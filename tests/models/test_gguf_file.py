"""GGUF files: blocks of every kind by hand, and false files refused by file and field."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import struct
import subprocess
import sys
import tracemalloc
from typing import Any

import gguf_cases
from gguf_cases import Record, raw, value
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from seerjax.models import gguf_file, huggingface, loading, tokenizer as tokenizer_lib


def half(number: float) -> bytes:
  return np.float16(number).tobytes()


def nibbles(numbers: list[int]) -> bytes:
  """Packs 32 four-bit numbers as a block of the simple kinds does: i together with i + 16."""
  return bytes(low | high << 4 for low, high in zip(numbers[:16], numbers[16:]))


def bits(numbers: list[int]) -> bytes:
  """The fifth bits of 32 numbers, the first one the lowest."""
  return struct.pack("<I", sum(bit << i for i, bit in enumerate(numbers)))


FOUR = [i % 16 for i in range(32)]
FIVE = [(3 * i) % 32 for i in range(32)]
# Eight blocks of 32: their scales and minima, of six bits.
SCALES, MINIMA = [1, 2, 3, 60, 17, 33, 48, 63], [0, 5, 9, 62, 16, 32, 47, 31]
LONG = [(7 * i) % 16 for i in range(256)]
LONG_FIVE = [(11 * i) % 32 for i in range(256)]
SIX = [(13 * i) % 64 for i in range(256)]
SIGNED = [(5 * i) % 41 - 20 for i in range(16)]


def packed_scales() -> bytes:
  """Scales and minima of a K block in 12 bytes: four whole ones each, then the others' parts."""
  first = [SCALES[i] | SCALES[i + 4] >> 4 << 6 for i in range(4)]
  second = [MINIMA[i] | MINIMA[i + 4] >> 4 << 6 for i in range(4)]
  third = [SCALES[i + 4] & 15 | (MINIMA[i + 4] & 15) << 4 for i in range(4)]
  return bytes(first + second + third)


def pairs(numbers: list[int]) -> bytes:
  """256 numbers of four bits: of each 64, the first 32 low and the second 32 high."""
  return b"".join(
    bytes(numbers[i + j] & 15 | (numbers[i + j + 32] & 15) << 4 for j in range(32))
    for i in range(0, 256, 64)
  )


def fifths(numbers: list[int]) -> bytes:
  """Packs the fifth bits of 256 numbers: byte j has those of j, j + 32, j + 64, ..."""
  return bytes(sum((numbers[j + 32 * i] >> 4) << i for i in range(8)) for j in range(32))


def sixes(numbers: list[int]) -> tuple[bytes, bytes]:
  """(the low four bits, the high two bits) of 256 numbers of six bits."""
  low, high = bytearray(128), bytearray(64)
  for i in (0, 1):
    for j in range(32):
      q = [numbers[128 * i + 32 * k + j] for k in range(4)]
      low[64 * i + j] = q[0] & 15 | (q[2] & 15) << 4
      low[64 * i + 32 + j] = q[1] & 15 | (q[3] & 15) << 4
      high[32 * i + j] = sum((n >> 4) << 2 * k for k, n in enumerate(q))
  return bytes(low), bytes(high)


PLAIN = [0.0, -1.5, 3.25, 65504.0, 2.0**-14, -0.0, 1.0, 100.0]
# Kind, the bytes of a block, and its numbers, all of them exact in float32.
BLOCKS: dict[str, tuple[bytes, list[float]]] = {
  "F32": (np.array(PLAIN, np.float32).tobytes(), PLAIN),
  "F16": (np.array(PLAIN, np.float16).tobytes(), PLAIN),
  "BF16": (bytes.fromhex("c03f00c04940"), [1.5, -2.0, 3.140625]),
  "Q4_0": (half(0.5) + nibbles(FOUR), [0.5 * (q - 8) for q in FOUR]),
  "Q4_1": (half(0.25) + half(-3) + nibbles(FOUR), [0.25 * q - 3 for q in FOUR]),
  "Q5_0": (
    half(-0.5) + bits([q >> 4 for q in FIVE]) + nibbles([q & 15 for q in FIVE]),
    [-0.5 * (q - 16) for q in FIVE],
  ),
  "Q8_0": (
    half(0.125) + bytes(range(112, 144)),
    [0.125 * (q - 256 * (q > 127)) for q in range(112, 144)],
  ),
  "Q4_K": (
    half(0.5) + half(0.25) + packed_scales() + pairs(LONG),
    [0.5 * SCALES[i // 32] * q - 0.25 * MINIMA[i // 32] for i, q in enumerate(LONG)],
  ),
  "Q5_K": (
    half(0.5) + half(0.25) + packed_scales() + fifths(LONG_FIVE) + pairs(LONG_FIVE),
    [0.5 * SCALES[i // 32] * q - 0.25 * MINIMA[i // 32] for i, q in enumerate(LONG_FIVE)],
  ),
  "Q6_K": (
    b"".join(sixes(SIX)) + np.array(SIGNED, np.int8).tobytes() + half(0.25),
    [0.25 * SIGNED[i // 16] * (q - 32) for i, q in enumerate(SIX)],
  ),
}


def written(path: pathlib.Path, content: bytes) -> pathlib.Path:
  path.write_bytes(content)
  return path


@pytest.mark.parametrize("kind", gguf_file.KINDS)
def test_blocks_are_the_numbers_that_their_bits_say(kind, tmp_path):
  block, numbers = BLOCKS[kind]
  # Three rows of two blocks, so that rows and blocks are distinguished.
  record = Record((3, 2 * len(numbers)), kind, block * 6)
  file = gguf_file.File(written(tmp_path / "m.gguf", raw({}, {"x": record})))
  assert file.tensors["x"].size == 6 * len(block)
  found = file.read("x")
  assert found.dtype == np.float32
  assert found.tolist() == [numbers * 2] * 3


def test_rows_are_turned_into_float32_a_few_at_a_time(tmp_path):
  width = 2**15
  rows = np.arange(100 * width, dtype=np.float32).reshape(100, width)
  assert len(rows) > gguf_file.NUMBERS_AT_ONCE // width
  record = Record(rows.shape, "F32", rows.tobytes())
  file = gguf_file.File(written(tmp_path / "m.gguf", raw({}, {"x": record})))
  assert np.array_equal(file.read("x"), rows)


def test_metadata_of_every_kind_is_read(tmp_path):
  entries = {
    **{kind: value(kind, 1) for kind in gguf_cases.LETTERS},
    "text": value("str", "größer"),
    "texts": value("list str", ["a", "", "b c"]),
    "numbers": value("list i16", [-1, 2]),
    "flags": value("list bool", [1, 0]),
    "small": value("f32", 1e-6),
  }
  found = gguf_file.File(written(tmp_path / "m.gguf", raw(entries, {}))).metadata
  assert found["text"] == "größer" and found["texts"] == ["a", "", "b c"]
  assert found["numbers"].tolist() == [-1, 2] and found["flags"].tolist() == [True, False]
  assert found["bool"] is True and found["f64"] == 1.0 and found["i8"] == 1
  assert found["small"] == 1e-6  # As it was written, not 9.999999974752427e-07.


def test_offsets_follow_the_alignment(tmp_path):
  data = np.arange(8, dtype=np.float32)
  records = {name: Record((8,), "F32", (data + i).tobytes()) for i, name in enumerate("ab")}
  entries = {"general.alignment": value("u32", 256)}
  path = written(tmp_path / "m.gguf", raw(entries, records, alignment=256))
  file = gguf_file.File(path)
  assert file.tensors["b"].offset - file.tensors["a"].offset == 256
  assert file.read("b").tolist() == (data + 1).tolist()


def split(directory: pathlib.Path, *, count: int = 3, **changes: Any) -> pathlib.Path:
  """Writes a model in three files; returns the first one's path."""
  entries, records = gguf_cases.parts()
  names = list(records)
  bounds = [0, 5, 9, len(names)]
  for number in range(3):
    of_part = {name: records[name] for name in names[bounds[number] : bounds[number + 1]]}
    marks = {
      "split.no": value("u16", number),
      "split.count": value("u16", count),
      "split.tensors.count": value("i32", len(names)),
    } | changes.get(f"of_{number}", {})
    content = raw((entries if number == 0 else {}) | marks, of_part)
    written(directory / f"m-{number + 1:05d}-of-00003.gguf", content)
  return directory / "m-00001-of-00003.gguf"


def test_a_model_in_several_files_is_read_by_the_first(tmp_path):
  first = split(tmp_path)
  whole = written(tmp_path / "m.gguf", raw(*gguf_cases.parts()))
  one, other = (huggingface.load(path, gguf_cases.NUMERICS) for path in (first, whole))
  assert one[1] == other[1]
  for layer, same in zip(one[0]["layers"], other[0]["layers"], strict=True):
    assert all(np.array_equal(layer[name], same[name]) for name in layer)
  assert np.array_equal(one[0]["embed"], other[0]["embed"])


@pytest.mark.parametrize(
  "spoil, error, fragments",
  [
    (lambda d: (d / "m-00003-of-00003.gguf").unlink(), FileNotFoundError,
     ["m-00003-of-00003.gguf: got no such file", "all 3 files"]),
    (lambda d: split(d, of_1={"split.no": value("u16", 2)}), ValueError,
     ["m-00002-of-00003.gguf: split.no: got 2, expected 1"]),
    (lambda d: split(d, of_2={"split.count": value("u16", 4)}), ValueError,
     ["m-00003-of-00003.gguf: split.count: got 4, expected 3"]),
    (lambda d: split(d, of_0={"split.tensors.count": value("i32", 99)}), ValueError,
     ["split.tensors.count: got 99, expected 20, the number"]),
    (lambda d: split(d, count=2), ValueError, ["split.count: got 2", "-of-00002.gguf"]),
  ],
)  # fmt: skip
def test_files_of_a_split_model_that_do_not_belong_together(spoil, error, fragments, tmp_path):
  first = split(tmp_path)
  spoil(tmp_path)
  refused(lambda: gguf_file.File(first), error, fragments)


def test_a_split_model_is_named_by_its_first_file(tmp_path):
  split(tmp_path)
  refused(
    lambda: gguf_file.File(tmp_path / "m-00002-of-00003.gguf"),
    ValueError,
    ["m-00002-of-00003.gguf: split.no: got 1", "pass the first file"],
  )
  (tmp_path / "m-00001-of-00003.gguf").rename(tmp_path / "renamed.gguf")
  refused(
    lambda: gguf_file.File(tmp_path / "renamed.gguf"),
    ValueError,
    ["renamed.gguf: split.count: got 3", "restore the original file names"],
  )


@pytest.mark.parametrize("name, place", [("MAX_ENTRIES", 1), ("MAX_TENSORS", 0)])
def test_a_long_file_promises_no_more_entries_than_there_ever_are(name, place, tmp_path):
  """The file's bytes would suffice for the entries, but Python objects take many times as much."""
  most = vars(gguf_file)[name]
  counts = [(0, most + 1), (most + 1, 0)][1 - place]
  content = raw({}, {}, counts=counts)
  path = tmp_path / "m.gguf"
  with path.open("wb") as out:
    out.write(content)
    out.truncate(40 * most + 2**20)  # A hole, which takes no disk.
  refused(lambda: gguf_file.File(path), ValueError, [f"got {most + 1}", f"at most the {most}"])


def refused(call: Any, error: type[Exception], fragments: list[str]) -> None:
  with pytest.raises(error) as found:
    call()
  for fragment in fragments:
    assert fragment in str(found.value)


# False files: (change, error, text of its message).

Parts = tuple[dict[str, bytes], dict[str, Record]]


def entry(key: str, kind: str, content: Any) -> Any:
  """Changes or adds an entry."""
  return lambda entries, records: raw({**entries, key: value(kind, content)}, records)


def without(key: str) -> Any:
  return lambda entries, records: raw({k: v for k, v in entries.items() if k != key}, records)


def bytes_of(key: str, content: bytes) -> Any:
  """Changes an entry to invalid bytes."""
  return lambda entries, records: raw({**entries, key: content}, records)


def record(name: str, **changes: Any) -> Any:
  def change(entries: dict[str, bytes], records: dict[str, Record]) -> bytes:
    return raw(entries, {**records, name: dataclasses.replace(records[name], **changes)})

  return change


def added(name: str, new: Record) -> Any:
  return lambda entries, records: raw(entries, {**records, name: new})


def left_out(name: str) -> Any:
  return lambda entries, records: raw(entries, {n: r for n, r in records.items() if n != name})


def numbers(name: str, spoil: float) -> Any:
  def change(entries: dict[str, bytes], records: dict[str, Record]) -> bytes:
    found = np.frombuffer(records[name].data, np.float32).copy()
    found[7] = spoil
    return raw(entries, {**records, name: dataclasses.replace(records[name], data=found.tobytes())})

  return change


def twice(key: str) -> Any:
  def change(entries: dict[str, bytes], records: dict[str, Record]) -> bytes:
    # The name of the last entry is overwritten by one of equal length.
    name = "tokenizer.ggml.add_bos_tokex"
    content = raw({**entries, name: value("u32", 1)}, records)
    return content.replace(name.encode(), name[:-1].encode() + b"n")

  return change


Q4 = Record((32, 32), "Q4_0", (half(np.nan) + bytes(16)) * 32)
BLOCK = "blk.0.attn_q.weight"
KV = "llama.attention.head_count_kv"
DAMAGE: dict[str, tuple[Any, type[Exception], list[str]]] = {
  # The container.
  "empty": (lambda e, r: b"", ValueError, ["got 0 bytes"]),
  "short": (lambda e, r: raw(e, r)[:20], ValueError, ["got 20 bytes", "24"]),
  "magic": (lambda e, r: raw(e, r, start=b"GGML\3\0\0\0"), ValueError, ["b'GGML'", "b'GGUF'"]),
  "a pickle": (lambda e, r: b"PK\3\4" + bytes(99), ValueError, ["b'PK", "not a GGUF file"]),
  "version 1":
    (lambda e, r: raw(e, r, start=b"GGUF\1\0\0\0"), NotImplementedError, ["version: got 1"]),
  "version 4":
    (lambda e, r: raw(e, r, start=b"GGUF\4\0\0\0"), NotImplementedError, ["version: got 4"]),
  "big-endian":
    (lambda e, r: raw(e, r, start=b"GGUF\0\0\0\3"), NotImplementedError, ["3 in big-endian order"]),
  "truncated in the metadata":
    (lambda e, r: raw(e, r)[:700], ValueError, ["tokenizer.ggml.tokens"]),
  "truncated in the data":
    (lambda e, r: raw(e, r)[:-1000], ValueError, ["bytes at offset", "within the file's"]),
  "as many entries as fit no disk": (
    lambda e, r: raw(e, r, counts=(len(r), 2**62)), ValueError, ["number of metadata entries: got"]
  ),
  "more entries than there are":
    (lambda e, r: raw(e, r, counts=(len(r), len(e) + 40)), ValueError, [" "]),
  "as many tensors as fit no disk":
    (lambda e, r: raw(e, r, counts=(2**60, len(e))), ValueError, ["number of tensors: got"]),
  "a text longer than the file": (
    bytes_of("general.name", struct.pack("<IQ", 8, 2**40)), ValueError, ["general.name: got 1099"]
  ),
  "a list longer than the file": (
    bytes_of("general.tags", struct.pack("<IIQ", 9, 8, 2**50)), ValueError, ["tags: got", "strings"]
  ),
  "numbers longer than the file": (
    bytes_of("general.tags", struct.pack("<IIQ", 9, 4, 2**50)), ValueError, ["tags: got", "numbers"]
  ),
  "a list of lists":
    (bytes_of("general.tags", struct.pack("<IIQ", 9, 9, 1)), NotImplementedError, ["general.tags"]),
  "a kind of value that is none":
    (bytes_of("general.name", struct.pack("<I", 77)), ValueError, ["general.name", "kind 77"]),
  "a kind of list that is none": (
    bytes_of("general.tags", struct.pack("<IIQ", 9, 77, 1)), ValueError, ["general.tags", "kind 77"]
  ),
  "a flag that is none":
    (bytes_of("general.flag", struct.pack("<IB", 7, 2)), ValueError, ["general.flag: got 2"]),
  "text that is no UTF-8":
    (entry("general.name", "str", b"\xff\xfe"), ValueError, ["general.name", "not UTF-8"]),
  "a key twice": (twice("x"), ValueError, ["tokenizer.ggml.add_bos_token: got the key twice"]),
  "an alignment of zero":
    (entry("general.alignment", "u32", 0), ValueError, ["general.alignment: got 0"]),
  "an odd alignment":
    (entry("general.alignment", "u32", 24), ValueError, ["general.alignment: got 24"]),
  "an alignment in words":
    (entry("general.alignment", "str", "32"), ValueError, ["general.alignment: got '32'"]),
  # Records of tensors.
  "a kind that is not read":
    (record(BLOCK, kind="IQ2_XS"), NotImplementedError, [BLOCK, "IQ2_XS", "Q8_0"]),
  "a kind that there is not":
    (record(BLOCK, kind=999), NotImplementedError, [BLOCK, "number 999"]),
  "no dimension": (record(BLOCK, shape=()), ValueError, [BLOCK, "got 0 dimensions"]),
  "five dimensions":
    (record(BLOCK, shape=(2, 2, 2, 2, 2)), ValueError, [BLOCK, "got 5 dimensions"]),
  "a dimension of zero": (record(BLOCK, shape=(0, 32)), ValueError, [BLOCK, "(0, 32)"]),
  "a dimension beyond 64 bits":
    (record(BLOCK, shape=(2**63, 2**63)), ValueError, [BLOCK, "within the file's"]),
  "rows that are no blocks":
    (record(BLOCK, shape=(32, 31), kind="Q8_0"), ValueError, [BLOCK, "blocks of 32"]),
  "an offset beyond the file":
    (record(BLOCK, offset=2**40), ValueError, [BLOCK, "offset 1,099,511"]),
  "an offset that is not aligned": (record(BLOCK, offset=33), ValueError, [BLOCK, "offset 33"]),
  "data in another tensor":
    (record(BLOCK, offset=64), ValueError, ["expected at least", "ends"]),
  "a tensor twice": (
    lambda e, r: raw(e, {**r, "blk.0.attn_x.weight": r[BLOCK]}).replace(b"attn_x", b"attn_q"),
    ValueError,
    [f"{BLOCK}: got the tensor twice"],
  ),
  # The model.
  "no architecture":
    (without("general.architecture"), NotImplementedError, ["general.architecture: got None"]),
  "another architecture":
    (entry("general.architecture", "str", "gemma2"), NotImplementedError, ["'gemma2'", "'llama'"]),
  "an architecture that is no text":
    (entry("general.architecture", "u32", 3), NotImplementedError, ["general.architecture: got 3"]),
  "architectures": (
    entry("general.architecture", "list u32", [1, 2]), NotImplementedError, ["general.architecture"]
  ),
  "scalings": (
    entry("llama.rope.scaling.type", "list i32", [1, 2]), NotImplementedError, ["rope.scaling.type"]
  ),
  "numbers of experts":
    (entry("llama.expert_count", "list u32", [0, 0]), NotImplementedError, ["llama.expert_count"]),
  "a number of files that is none":
    (entry("split.count", "list u32", [1, 2]), ValueError, ["split.count: got", "a whole number"]),
  "a number of tensors that is none":
    (entry("split.tensors.count", "str", "20"), ValueError, ["split.tensors.count: got '20'"]),
  "experts":
    (entry("llama.expert_count", "u32", 8), NotImplementedError, ["llama.expert_count: got 8"]),
  "a key that is not computed":
    (entry("llama.attention.scale", "f32", 0.5), NotImplementedError, ["llama.attention.scale"]),
  "a window":
    (entry("llama.attention.sliding_window", "u32", 64), NotImplementedError,
     ["llama.attention.sliding_window: got 64"]),
  "no layer count": (without("llama.block_count"), ValueError, ["llama.block_count: got nothing"]),
  "layers that are not there":
    (entry("llama.block_count", "u32", 3), ValueError, ["no tensor blk.2.attn_k.weight"]),
  "more layers than tensors":
    (entry("llama.block_count", "u32", 2**30), ValueError, ["llama.block_count: got 1073741824"]),
  "a layer too many":
    (entry("llama.block_count", "u32", 1), ValueError, ["got the tensors blk.1.attn_k.weight"]),
  "no heads": (
    entry("llama.attention.head_count", "u32", 0), ValueError, ["llama.attention.head_count: got 0"]
  ),
  "heads as a list":
    (entry("llama.attention.head_count", "list u32", [4, 4]), ValueError, ["attention.head_count"]),
  "other heads":
    (entry("llama.attention.head_count", "u32", 8), ValueError, ["attn_k.weight: got shape", KV]),
  "heads that share nothing":
    (entry(KV, "u32", 3), ValueError, [f"{KV}: got 3", "a divisor of"]),
  "other heads of keys":
    (entry(KV, "u32", 4), ValueError,
     ["blk.0.attn_k.weight: got shape (16, 32), expected (32, 32)", KV]),
  "a width of one feature": (
    entry("llama.attention.key_length", "u32", 7), ValueError, ["llama.attention.key_length: got 7"]
  ),
  "a part of the features turns": (
    entry("llama.rope.dimension_count", "u32", 4), ValueError, ["llama.rope.dimension_count: got 4"]
  ),
  "another width":
    (entry("llama.embedding_length", "u32", 64), ValueError,
     ["got shape (400, 32), expected (400, 64) by llama.vocab_size, llama.embedding_length"]),
  "another width of the gate":
    (entry("llama.feed_forward_length", "u32", 96), ValueError,
     ["blk.0.ffn_gate.weight", "llama.feed_forward_length"]),
  "another vocabulary":
    (entry("llama.vocab_size", "u32", 401), ValueError, ["llama.vocab_size: 401", "token_embd"]),
  "fewer tokens":
    (entry("tokenizer.ggml.tokens", "list str", ["a", "b"]), ValueError, ["tokens: 2", "400"]),
  "an epsilon that is none":
    (entry("llama.attention.layer_norm_rms_epsilon", "f32", float("nan")), ValueError,
     ["layer_norm_rms_epsilon: got nan"]),
  "an epsilon of two":
    (entry("llama.attention.layer_norm_rms_epsilon", "f32", 2.0), ValueError, ["less than 1"]),
  "a base that is none":
    (entry("llama.rope.freq_base", "f32", -1.0), ValueError, ["llama.rope.freq_base: got -1.0"]),
  "a scaling that is not built":
    (entry("llama.rope.scaling.type", "str", "longrope"), NotImplementedError, ["'longrope'"]),
  "a scaling without its factor":
    (entry("llama.rope.scaling.type", "str", "linear"), ValueError, ["rope.scaling.factor"]),
  "factors of rotations that no scaling has": (
    added("rope_freqs.weight", Record((4,), "F32", np.float32([1, 5, 2, 8]).tobytes())),
    NotImplementedError,
    ["rope_freqs.weight: got factors from 1.0 to 8.0"],
  ),
  "factors of other features":
    (added("rope_freqs.weight", Record((8,), "F32", bytes(32))), ValueError,
     ["rope_freqs.weight: got shape (8,), expected (4,)"]),
  "factors that are no numbers": (
    added("rope_freqs.weight", Record((4,), "F32", np.float32([1, np.nan, 1, 1]).tobytes())),
    ValueError,
    ["rope_freqs.weight", "not positive numbers"],
  ),
  "no embedding": (left_out("token_embd.weight"), ValueError, ["no tensor token_embd.weight"]),
  "no norm": (left_out("blk.1.ffn_norm.weight"), ValueError, ["no tensor blk.1.ffn_norm.weight"]),
  "a tensor of another model": (
    added("blk.0.attn_q.bias", Record((32,), "F32", bytes(128))), ValueError, ["blk.0.attn_q.bias"]
  ),
  "a tensor of no model":
    (added("v.patch_embd", Record((32,), "F32", bytes(128))), ValueError, ["tensors v.patch_embd"]),
  "NaN": (numbers(BLOCK, np.nan), ValueError, [f"{BLOCK}: got 1 entries that are NaN or infinite"]),
  "infinity": (numbers("blk.1.ffn_norm.weight", np.inf), ValueError, ["blk.1.ffn_norm.weight"]),
  "blocks of NaN": (
    lambda e, r: raw(e, {**r, BLOCK: Q4}), ValueError, [f"{BLOCK}: got 1024 entries that are NaN"]
  ),
  # The tokenizer.
  "no tokenizer": (without("tokenizer.ggml.model"), NotImplementedError, ["tokenizer.ggml.model"]),
  "ids alone": (
    entry("tokenizer.ggml.model", "str", "no_vocab"), NotImplementedError, ["'no_vocab'", "'gpt2'"]
  ),
  "another tokenizer":
    (entry("tokenizer.ggml.model", "str", "bert"), NotImplementedError, ["'bert'", "'llama'"]),
  "no pre-tokenizer":
    (without("tokenizer.ggml.pre"), NotImplementedError, ["ggml.pre: got nothing", "'qwen2'"]),
  "another pre-tokenizer": (
    entry("tokenizer.ggml.pre", "str", "tekken"), NotImplementedError, ["got 'tekken'", "'qwen2'"]
  ),
  "no tokens": (without("tokenizer.ggml.tokens"), ValueError, ["ggml.tokens: got nothing"]),
  "tokens that are numbers":
    (entry("tokenizer.ggml.tokens", "list i32", [1] * 400), ValueError, ["tokenizer.ggml.tokens"]),
  "a token twice":
    (entry("tokenizer.ggml.tokens", "list str", ["a", "b", "a", *map(str, range(397))]), ValueError,
     ["tokenizer.ggml.tokens: got 'a' twice"]),
  "kinds of other tokens":
    (entry("tokenizer.ggml.token_type", "list i32", [1] * 399), ValueError, ["token_type"]),
  "a kind of token that is none":
    (entry("tokenizer.ggml.token_type", "list i32", [9] + [1] * 399), ValueError, ["[9]"]),
  "no merges": (without("tokenizer.ggml.merges"), ValueError, ["ggml.merges: got nothing"]),
  "a merge of one":
    (entry("tokenizer.ggml.merges", "list str", ["ab"]), ValueError, ["tokenizer.ggml.merges[0]"]),
  "a merge of no tokens":
    (entry("tokenizer.ggml.merges", "list str", ["qqq zzz"]), ValueError, ["[0]: got 'qqq zzz'"]),
  "an end that is no token":
    (entry("tokenizer.ggml.eos_token_id", "u32", 400), ValueError, ["eos_token_id: got 400"]),
  "an end that is no number":
    (entry("tokenizer.ggml.eot_token_id", "str", "2"), ValueError, ["eot_token_id: got '2'"]),
  "a bos token that there is not": (
    lambda e, r: raw(
      {k: v for k, v in e.items() if k != "tokenizer.ggml.bos_token_id"}
      | {"tokenizer.ggml.add_bos_token": value("bool", 1)}, r
    ),
    ValueError,
    ["tokenizer.ggml.add_bos_token: got True"],
  ),
  "a temperature that is none": (
    entry("general.sampling.temp", "str", "warm"), ValueError, ["general.sampling.temp: got 'warm'"]
  ),
  "a template that is none":
    (entry("tokenizer.chat_template", "u32", 1), ValueError, ["tokenizer.chat_template: got 1"]),
  "a tokenizer.json that is none":
    (entry("tokenizer.huggingface.json", "str", "{}"), ValueError, ["tokenizer.huggingface.json"]),
}  # fmt: skip


def load(path: pathlib.Path) -> None:
  huggingface.load(path, gguf_cases.NUMERICS)
  tokenizer_lib.load(path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_lies_is_refused_by_file_and_field(damage, tmp_path):
  change, error, fragments = DAMAGE[damage]
  path = written(tmp_path / "model.gguf", change(*gguf_cases.parts()))
  refused(lambda: load(path), error, ["model.gguf", *fragments])


def test_what_does_not_lie_is_read(tmp_path):
  load(written(tmp_path / "model.gguf", raw(*gguf_cases.parts())))
  assert len(DAMAGE) >= 40


SMALL = raw(*gguf_cases.parts())
HEAD = SMALL.index(b"output_norm.weight") + 60  # Behind the last record.


@hypothesis.given(st.lists(st.tuples(st.integers(0, HEAD), st.integers(0, 255)), max_size=4))
@hypothesis.settings(deadline=5000, max_examples=40)
def test_any_bytes_in_the_head_are_read_or_refused_by_the_file(tmp_path_factory, changes):
  check(tmp_path_factory, changes, None)


@hypothesis.given(st.integers(0, len(SMALL)))
@hypothesis.settings(deadline=5000, max_examples=20)
def test_any_part_of_a_file_is_refused_by_the_file(tmp_path_factory, length):
  check(tmp_path_factory, [], length)


def check(tmp_path_factory, changes: list[tuple[int, int]], length: int | None) -> None:
  content = bytearray(SMALL[:length])
  for place, byte in changes:
    content[place] = byte
  path = written(tmp_path_factory.mktemp("flips") / "model.gguf", bytes(content))
  message = "model.gguf"
  tracemalloc.start()
  try:
    load(path)
  except (ValueError, NotImplementedError) as error:
    message = str(error)
  finally:
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
  assert "model.gguf" in message
  # Memory for the file's content as Python strings and numbers, not for the claimed counts.
  assert peak < 40 * len(SMALL)


def test_without_the_package_what_to_install_is_said(tmp_path):
  path = written(tmp_path / "model.gguf", raw(*gguf_cases.parts()))
  program = (
    "import sys; sys.modules['gguf'] = None\n"
    "from seerjax.models import gguf_file\n"
    f"try: gguf_file.File({str(path)!r})\n"
    "except ImportError as error: print(error)\n"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert "pip install seerjax[gguf]" in done.stdout


def test_a_file_that_is_not_there_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=re.escape("none.gguf")):
    loading.load_model(tmp_path / "none.gguf")
