"""The call journal: calls that are found, calls that are repeated, and errors."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import small_files

from seerjax.rollout import journal as rollouts
from seerjax.sleep import thinkers
from seerjax.sleep.call_journal import CallJournal
from seerjax.sleep.thinkers import Call, Completed, NoAnswer

WHO = {"model": "tiny", "numerics": {"dtype": "float32"}}
ROOT = pathlib.Path(__file__).parents[2]


def call(text: str = "q", **fields) -> Call:
  fields = dict(max_tokens=4, temperature=0.0, seed=1) | fields
  return Call(messages=({"role": "user", "content": text},), **fields)


ANSWER = Completed(text="a \ud800 b", num_tokens=3, num_prompt_tokens=7, finish_reason="length")


def test_an_answer_is_found_by_all_that_decides_it(tmp_path: pathlib.Path):
  path = tmp_path / "deep" / "calls.jsonl"
  with CallJournal(path, settings=WHO) as journal:
    journal.append(call(), ANSWER)
  with CallJournal(path, settings=WHO) as journal:
    assert journal.answer(call()) == ANSWER
    for other in (call("Q"), call(max_tokens=5), call(temperature=0.5), call(seed=2)):
      assert journal.answer(other) is None
    assert journal.answer(call(temperature=0)) == ANSWER


def test_what_had_no_answer_is_asked_again(tmp_path: pathlib.Path):
  answers = [NoAnswer("not now"), ANSWER]

  def ask(calls):
    for index, _ in enumerate(calls):
      yield index, answers.pop(0)

  path = tmp_path / "calls.jsonl"
  for expected in ("not now", ANSWER):
    with CallJournal(path, settings=WHO) as journal:
      ((_, answer),) = journal.asking(ask)([call()])
      assert answer == expected or str(answer) == expected
      assert journal.num_asked == 1
      assert journal.num_failed == (expected == "not now")
  assert b'"error":"not now"' in path.read_bytes()


def test_a_torn_tail_is_cut_off_and_asked_again(tmp_path: pathlib.Path):
  path = tmp_path / "calls.jsonl"
  with CallJournal(path, settings=WHO) as journal:
    journal.append(call(), ANSWER)
    size = path.stat().st_size
    journal.append(call("second"), ANSWER)
  whole = path.read_bytes()
  for end in range(size + 1, len(whole), 37):
    path.write_bytes(whole[:end])
    with CallJournal(path, settings=WHO) as journal:
      assert journal.truncated_bytes == end - size
      assert journal.answer(call()) == ANSWER and journal.answer(call("second")) is None
  path.write_bytes(whole[:11])  # Within the header.
  with CallJournal(path, settings=WHO) as journal:
    assert journal.answer(call()) is None


@pytest.mark.thorough
def test_a_kill_loses_at_most_the_call_in_work(tmp_path: pathlib.Path):
  path = tmp_path / "calls.jsonl"
  program = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT / "tests" / "sleep")!r}, {str(ROOT / "tests" / "support")!r}]
from test_call_journal import *
journal = CallJournal({str(path)!r}, settings=WHO)
for number in range(10):
  journal.append(call(str(number)), ANSWER)
  if number == 6:
    os.kill(os.getpid(), signal.SIGKILL)
"""
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
  assert done.returncode == -signal.SIGKILL
  with CallJournal(path, settings=WHO) as journal:
    assert [journal.answer(call(str(n))) == ANSWER for n in range(8)] == [True] * 7 + [False]


def test_other_thinkers_writers_and_files_are_refused(tmp_path: pathlib.Path):
  path = tmp_path / "calls.jsonl"
  second = pytest.raises(ValueError, match="got a journal that another writer has open, expected")
  with CallJournal(path, settings=WHO), second:
    CallJournal(path, settings=WHO)
  with pytest.raises(
    ValueError, match=r"got a different thinker \(model was 'tiny' and is 'huge'\), expected the"
  ):
    CallJournal(path, settings=WHO | {"model": "huge"})
  with pytest.raises(ValueError, match="CallJournal: got settings that are not JSON"):
    CallJournal(path, settings={"model": object()})
  with pytest.raises(ValueError, match="got a directory, expected the journal's file, or none yet"):
    CallJournal(tmp_path, settings=WHO)
  stranger = tmp_path / "notes.txt"
  stranger.write_text("mine\n")
  with pytest.raises(ValueError, match="as the first record, expected a journal of calls of f"):
    CallJournal(stranger, settings=WHO)
  assert stranger.read_text() == "mine\n"
  lines = path.read_bytes().split(b"\n")
  path.write_bytes(b"\n".join([lines[0], b"{}", lines[0], b""]))
  with pytest.raises(ValueError, match="got a damaged record in line 2 .* with more records"):
    CallJournal(path, settings=WHO)
  with rollouts.Journal(tmp_path / "journal.jsonl", fingerprint={}, settings={}):
    pass
  with pytest.raises(ValueError, match="'kind': 'header'.* expected a journal of calls"):
    CallJournal(tmp_path / "journal.jsonl", settings=WHO)


def test_a_closed_journal_and_a_full_disk_are_refused(tmp_path: pathlib.Path):
  path = tmp_path / "calls.jsonl"
  journal = CallJournal(path, settings=WHO)
  journal.append(call(), ANSWER)
  size = path.stat().st_size
  full = pytest.raises(OSError, match="expected room for them; free some")
  with small_files.bounded(size + 20), full as found:
    journal.append(call("more"), ANSWER)
  assert found.value.errno == errno.EFBIG
  assert os.path.getsize(path) == size
  journal.append(call("more"), ANSWER)
  journal.close()
  journal.close()
  with pytest.raises(ValueError, match="got a record for a closed journal, expected an open one"):
    journal.append(call(), ANSWER)
  with CallJournal(path, settings=WHO) as again:
    assert again.answer(call("more")) == ANSWER


def test_keys_and_numbers_are_those_of_every_machine():
  assert call().prompt_digest == "d2da898773365b5a910ab5a3194340e3024d5e5ae728d32138e86090b362fe93"
  assert call().key == "ef8ee68915d266d362818d202fd93d5b5ca60918363a4a69f4017b73692278cd"
  assert thinkers.number_of("Ana") == 15782781713220936414
