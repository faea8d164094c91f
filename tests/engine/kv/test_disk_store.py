"""The store on a disk: bounds, what a process before left there."""

from __future__ import annotations

import pytest

from seerjax.engine.kv.disk_store import DiskStore


def test_what_was_put_comes_back_and_goes(tmp_path):
  store = DiskStore(tmp_path / "kv", max_bytes=1000)
  assert store.put("0/1/2", b"abc") and store.get("0/1/2") == b"abc"
  assert store.put("0/1/2", b"other") and store.get("0/1/2") == b"other"
  assert store.num_bytes == 5
  store.remove("0/1/2")
  store.remove("0/1/2")
  assert store.num_bytes == 0 and not list((tmp_path / "kv").iterdir())
  assert store.get("0/1/2") is None


def test_a_full_store_says_so_and_keeps_what_it_has(tmp_path):
  store = DiskStore(tmp_path, max_bytes=20)
  assert store.put("a", b"x" * 15) and not store.put("b", b"x" * 6)
  assert store.get("a") == b"x" * 15 and store.put("a", b"y" * 20)


def test_files_of_a_process_before_are_removed_and_others_kept(tmp_path):
  DiskStore(tmp_path, max_bytes=100).put("a", b"abc")
  (tmp_path / "notes.txt").write_text("mine")
  assert DiskStore(tmp_path, max_bytes=100).num_bytes == 0
  assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_negative_size_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"DiskStore.max_bytes: got -1, expected at least 0"):
    DiskStore(tmp_path, max_bytes=-1)
