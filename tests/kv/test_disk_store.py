"""The disk store: bounds, files of other processes, and files left by an earlier process."""

from __future__ import annotations

import gc
import pathlib

import pytest

from seerjax.kv.disk_store import DiskStore


def values(directory: pathlib.Path) -> list[pathlib.Path]:
  return sorted(directory.glob("*/*.kv"))


def test_what_was_put_comes_back_and_goes(tmp_path):
  store = DiskStore(tmp_path / "kv", max_bytes=1000)
  assert store.put("0/1/2", b"abc") and store.get("0/1/2") == b"abc" and store.has("0/1/2")
  assert store.put("0/1/2", b"other") and store.get("0/1/2") == b"other"
  assert store.num_bytes == 5 and len(values(tmp_path / "kv")) == 1
  store.remove("0/1/2")
  store.remove("0/1/2")
  assert store.num_bytes == 0 and not values(tmp_path / "kv")
  assert store.get("0/1/2") is None and not store.has("0/1/2")


def test_a_full_store_says_so_and_keeps_what_it_has(tmp_path):
  store = DiskStore(tmp_path, max_bytes=20)
  assert store.put("a", b"x" * 15) and not store.put("b", b"x" * 6)
  assert store.get("a") == b"x" * 15 and store.put("a", b"y" * 20)


def test_one_process_reads_anothers_values_and_removes_none_of_them(tmp_path):
  first, second = (DiskStore(tmp_path, max_bytes=100) for _ in range(2))
  assert first.put("a", b"abc") and second.get("a") == b"abc" and second.has("a")
  assert second.num_bytes == 0
  second.remove("a")
  assert first.get("a") == b"abc"
  assert second.put("a", b"abc")
  first.remove("a")
  assert first.get("a") == second.get("a") == b"abc"


def test_files_of_a_process_that_is_gone_are_taken_over_and_go_first(tmp_path):
  store = DiskStore(tmp_path, max_bytes=100)
  assert store.put("a", b"abc") and store.put("b", b"defg")
  (tmp_path / "notes.txt").write_text("mine")
  del store
  gc.collect()
  store = DiskStore(tmp_path, max_bytes=10)
  assert (store.get("a"), store.get("b"), store.num_bytes) == (b"abc", b"defg", 7)
  assert store.put("c", b"x" * 8) and not store.has("a") and store.get("c") == b"x" * 8
  assert store.num_bytes <= 10 and (tmp_path / "notes.txt").read_text() == "mine"
  assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_a_negative_size_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"DiskStore.max_bytes: got -1, expected at least 0"):
    DiskStore(tmp_path, max_bytes=-1)
