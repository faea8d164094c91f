"""The journal keeps every bit, survives a kill, and refuses foreign records."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from seerjax.rollout import journal, journal_records
from seerjax.types import Completion, Request, Rollout, SamplingParams, Verdict

FINGERPRINT = {"row_tile": "16", "jax_version": "0.12", "digest": "aaaa"}
PYTHONPATH = os.pathsep.join([str(pathlib.Path(__file__).parent), *filter(None, sys.path)])
SETTINGS = {"seed": 3, "model": "nano", "group_size": 8}


def make_rollout(seed: int = 0, length: int = 5, **verdict) -> Rollout:
  rng = np.random.default_rng(seed)
  request = Request(
    request_id=f"r{seed}",
    prompt=(1, 2, 3 + seed),
    seed=2**63 + seed,
    group_id="g",
    sampling=SamplingParams(
      temperature=0.7,
      top_k=3,
      top_p=0.9,
      min_p=0.1,
      presence_penalty=0.3,
      frequency_penalty=-0.7,
      repetition_penalty=1.1,
      logit_bias=((4, float("-inf")), (5, 0.25)),
      max_tokens=9,
      stop_token_ids=(2,),
      stop=("</s>",),
    ),
  )
  completion = Completion(
    request_id=request.request_id,
    tokens=tuple(int(token) for token in rng.integers(0, 99, length)),
    behaviour_logprobs=-rng.random(length, np.float32),
    raw_logprobs=-rng.random(length, np.float32),
    text="<b>é\ud800\n",
    finish_reason="stop",
    policy_version=7,
  )
  verdict = dict(reward=0.1, correct=True, well_formed=True, answer="7/2") | verdict
  return Rollout(request=request, completion=completion, verdict=Verdict(**verdict))


def open_journal(path: pathlib.Path, **changes) -> journal.Journal:
  return journal.Journal(path, **(dict(fingerprint=FINGERPRINT, settings=SETTINGS) | changes))


def assert_equal(got: Rollout, expected: Rollout) -> None:
  assert got.request == expected.request
  assert got.verdict == expected.verdict
  for name, value in vars(expected.completion).items():
    stored = vars(got.completion)[name]
    if isinstance(value, np.ndarray):
      assert stored.dtype == np.float32 and stored.tobytes() == value.tobytes(), name
    else:
      assert stored == value, name


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_every_bit_of_a_logprob_comes_back(words):
  values = np.array(words, np.uint32).view(np.float32)  # NaN payloads and denormals included.
  rollout = make_rollout(length=len(words))
  completion = Completion(**(vars(rollout.completion) | dict(behaviour_logprobs=values)))
  rollout = Rollout(request=rollout.request, completion=completion, verdict=rollout.verdict)
  text = json.dumps(journal_records.to_record(rollout), allow_nan=False)
  assert_equal(journal_records.from_record(json.loads(text)), rollout)


def test_lookup_finds_what_was_appended_also_after_reopening(tmp_path):
  path = tmp_path / "journal.jsonl"
  with open_journal(path) as book:
    for member in range(3):
      assert book.append(1, 0, member, make_rollout(member), prompt_text="why?", problem_id="p1")
  with open_journal(path) as book:
    assert book.keys() == ((1, 0, 0), (1, 0, 1), (1, 0, 2))
    entry = book.lookup(1, 0, 2)
    assert_equal(entry.rollout, make_rollout(2))
    assert (entry.problem_id, entry.prompt_text, entry.epoch) == ("p1", "why?", 0)
    assert book.lookup(1, 0, 3) is None
    assert book.truncated_bytes == 0


def test_every_line_is_strict_json(tmp_path):
  with open_journal(tmp_path / "j") as book:
    book.append(0, 0, 0, make_rollout(reward=float("nan")))

  def refuse(word):
    raise AssertionError(word)

  lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "j").open()]
  assert [line["record"]["kind"] for line in lines] == ["header", "rollout"]
  _, entries = journal.read(tmp_path / "j")
  assert np.isnan(next(entries).rollout.verdict.reward)


def test_a_tail_torn_at_any_byte_is_cut_off(tmp_path):
  path = tmp_path / "j"
  with open_journal(path) as book:
    book.append(0, 0, 0, make_rollout(0))
    header_and_one = path.stat().st_size
    book.append(0, 0, 1, make_rollout(1))
  whole = path.read_bytes()
  for size in range(header_and_one, len(whole), 37):
    path.write_bytes(whole[:size])
    with open_journal(path) as book:
      assert book.truncated_bytes == size - header_and_one
      assert book.keys() == ((0, 0, 0),)
      book.append(0, 0, 1, make_rollout(1))
    assert path.read_bytes() == whole


def test_a_torn_header_starts_the_journal_anew(tmp_path):
  path = tmp_path / "j"
  open_journal(path).close()
  whole = path.read_bytes()
  for size in (0, 1, 5, 40, len(whole) - 1):
    path.write_bytes(whole[:size])
    open_journal(path).close()
    assert path.read_bytes() == whole


def test_zeros_after_a_power_cut_are_cut_off(tmp_path):
  path = tmp_path / "j"
  with open_journal(path) as book:
    book.append(0, 0, 0, make_rollout())
  whole = path.read_bytes()
  path.write_bytes(whole + b"\0" * 512)
  with open_journal(path) as book:
    assert book.truncated_bytes == 512
  assert path.read_bytes() == whole


def test_damage_before_the_end_is_refused_with_line_and_byte(tmp_path):
  path = tmp_path / "j"
  with open_journal(path) as book:
    start = path.stat().st_size
    book.append(0, 0, 0, make_rollout(0))
    book.append(0, 0, 1, make_rollout(1))
  data = bytearray(path.read_bytes())
  data[start + 60] ^= 1
  path.write_bytes(data)
  with pytest.raises(ValueError, match=rf"damaged record in line 2 \(byte {start}\)"):
    open_journal(path)


def test_a_foreign_file_is_refused_and_left_alone(tmp_path):
  path = tmp_path / "notes.txt"
  path.write_text("my notes")
  with pytest.raises(ValueError, match="expected a journal's header"):
    open_journal(path)
  assert path.read_text() == "my notes"


def test_a_record_changed_under_an_open_journal_is_refused(tmp_path):
  with open_journal(tmp_path / "j") as book:
    start = (tmp_path / "j").stat().st_size
    book.append(0, 0, 0, make_rollout())
    data = bytearray((tmp_path / "j").read_bytes())
    data[-10] ^= 1
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(ValueError, match=f"got a damaged record at byte {start}"):
      book.lookup(0, 0, 0)


def test_other_settings_are_refused_with_both_values(tmp_path):
  open_journal(tmp_path / "j").close()
  with pytest.raises(ValueError, match="group_size was 8 and is 16; seed was 3 and is None"):
    open_journal(tmp_path / "j", settings={"model": "nano", "group_size": 16})


def test_settings_that_are_no_json_are_refused(tmp_path):
  with pytest.raises(ValueError, match="settings that are not JSON"):
    open_journal(tmp_path / "j", settings={"dtype": np.float32(1)})


def test_another_fingerprint_is_refused_or_starts_an_epoch(tmp_path):
  path, other = tmp_path / "j", FINGERPRINT | {"row_tile": "64", "digest": "bbbb"}
  with open_journal(path) as book:
    book.append(1, 0, 0, make_rollout(0))
    book.append(2, 0, 0, make_rollout(1))
  with pytest.raises(ValueError, match="row_tile was '16' and is '64'"):
    open_journal(path, fingerprint=other)
  with open_journal(path, fingerprint=other, accept_new_numerics=True, resume_step=1) as book:
    assert book.lookup(1, 0, 0).epoch == 0
    assert book.lookup(2, 0, 0) is None  # Its bits are of the old numerics.
    book.append(2, 0, 0, make_rollout(2))
    assert book.lookup(2, 0, 0).epoch == 1
  with open_journal(path, fingerprint=other) as book:
    assert book.fingerprints == [FINGERPRINT, other]
    assert_equal(book.lookup(2, 0, 0).rollout, make_rollout(2))
  header, entries = journal.read(path)
  assert header.fingerprints == (FINGERPRINT, other) and header.settings == SETTINGS
  assert [(entry.step, entry.epoch) for entry in entries] == [(1, 0), (2, 1)]


def test_sampling_again_must_give_equal_bits(tmp_path):
  with open_journal(tmp_path / "j") as book:
    rollout = make_rollout()
    assert book.append(4, 1, 2, rollout)
    assert not book.append(4, 1, 2, make_rollout())
    logprobs = rollout.completion.behaviour_logprobs.copy()
    logprobs.view(np.uint32)[0] ^= 1  # The twin: one mantissa bit.
    completion = Completion(**(vars(rollout.completion) | dict(behaviour_logprobs=logprobs)))
    changed = Rollout(request=rollout.request, completion=completion, verdict=rollout.verdict)
    with pytest.raises(ValueError, match="member 2: rollout.completion.behaviour_logprobs was"):
      book.append(4, 1, 2, changed)


def test_logprobs_of_another_dtype_are_refused(tmp_path):
  chunk = make_chunk(0, 3)
  raw = chunk.raw_logprobs.astype(np.float64)
  with open_journal(tmp_path / "journal.jsonl") as kept:
    with pytest.raises(ValueError, match="got raw_logprobs of dtype float64"):
      kept.append_chunk(0, 0, 0, dataclasses.replace(chunk, raw_logprobs=raw))
    assert kept.append_chunk(0, 0, 0, chunk)


def test_what_an_error_ended_is_not_kept(tmp_path):
  rollout = make_rollout()
  broken = dataclasses.replace(rollout.completion, finish_reason="error", error="it broke")
  with open_journal(tmp_path / "journal.jsonl") as kept:
    with pytest.raises(ValueError, match=r"got a rollout that ended with an error \(it broke\)"):
      kept.append(0, 0, 0, dataclasses.replace(rollout, completion=broken))
    assert kept.append(0, 0, 0, rollout)


def make_chunk(start: int, stop: int, flip: int = -1) -> journal_records.Chunk:
  logprobs = -np.arange(10, dtype=np.float32) / 7
  if flip >= 0:
    logprobs.view(np.uint32)[flip] ^= 1
  return journal_records.Chunk(
    request=make_rollout().request,
    start=start,
    tokens=tuple(range(start, stop)),
    behaviour_logprobs=logprobs[start:stop],
    raw_logprobs=logprobs[start:stop] * 2,
    policy_version=1,
  )


def test_chunks_join_without_gaps_whatever_their_borders(tmp_path):
  with open_journal(tmp_path / "j") as book:
    assert book.append_chunk(0, 0, 0, make_chunk(0, 4))
    assert book.append_chunk(0, 0, 0, make_chunk(2, 7))
    assert not book.append_chunk(0, 0, 0, make_chunk(1, 6))
    with pytest.raises(ValueError, match="starts at token 9, expected at most token 7"):
      book.append_chunk(0, 0, 0, make_chunk(9, 10))
    with pytest.raises(ValueError, match="behaviour_logprobs at token 3 was"):
      book.append_chunk(0, 0, 0, make_chunk(2, 8, flip=3))
  with open_journal(tmp_path / "j") as book:
    parts = book.chunks(0, 0, 0)
    assert sum((part.tokens for part in parts), ()) == tuple(range(7))
    joined = np.concatenate([part.behaviour_logprobs for part in parts])
    assert joined.tobytes() == make_chunk(0, 7).behaviour_logprobs.tobytes()
    assert book.chunks(0, 0, 1) == ()


def test_the_first_attempt_counts_also_after_reopening(tmp_path):
  first = {"artefact": [1, 0.1], "status": "ok"}
  with open_journal(tmp_path / "j") as book:
    assert book.attempt(2, 0, 1) is None
    assert book.append_attempt(2, 0, 1, first)
    assert not book.append_attempt(2, 0, 1, {"status": "time limit"})
  with open_journal(tmp_path / "j") as book:
    assert book.attempt(2, 0, 1) == first and book.attempt(2, 0, 0) is None
    assert not book.append_attempt(2, 0, 1, {})
    assert book.keys() == ()
  _, entries = journal.read(tmp_path / "j")
  assert list(entries) == []
  # Another epoch of the numerics makes the steps after its own again.
  other = FINGERPRINT | {"row_tile": "32", "digest": "bbbb"}
  for resume_step, expected in ((2, first), (1, None)):
    changes = dict(fingerprint=other, accept_new_numerics=True, resume_step=resume_step)
    with open_journal(tmp_path / "j", **changes) as book:
      assert book.attempt(2, 0, 1) == expected
    other = other | {"digest": "cccc"}


def test_events_keep_their_order_also_after_reopening(tmp_path):
  path = tmp_path / "journal.jsonl"
  written = [{"event": "joined", "worker": 1}, {"event": "ended", "worker": 1, "chunk": 4}]
  with open_journal(path) as book:
    assert [book.append_event(event) for event in written] == [0, 1]
    book.append(0, 0, 0, make_rollout())
  with open_journal(path) as book:
    assert list(book.events()) == written
    assert book.append_event({"event": "lost", "worker": 1}) == 2
    assert book.lookup(0, 0, 0) is not None
  assert len(list(journal.read(path)[1])) == 1


def test_a_closed_journal_takes_no_record(tmp_path):
  book = open_journal(tmp_path / "j")
  book.close()
  book.close()
  with pytest.raises(ValueError, match="closed journal"):
    book.append(0, 0, 0, make_rollout())


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path):
  path = tmp_path / "j"
  with open_journal(path) as book:
    book.append(0, 0, 0, make_rollout())
    before = path.read_bytes() + b"half a rec"  # As if the first were in the middle of a record.
    path.write_bytes(before)
    message = r"j: got a journal that another writer has open, expected one writer at .* or choose"
    with pytest.raises(ValueError, match=message):
      open_journal(path)
    assert path.read_bytes() == before
    header, _ = journal.read(path)  # Readers need not wait.
    assert header.settings == SETTINGS
  with open_journal(path) as book:
    assert book.keys() == ((0, 0, 0),)
  # A refused journal holds no lock.
  with pytest.raises(ValueError, match="seed was 3 and is 4"):
    open_journal(path, settings=SETTINGS | {"seed": 4})
  open_journal(path).close()


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
    capture_output=True,
    text=True,
    timeout=60,
    env=os.environ | {"PYTHONPATH": PYTHONPATH},
  )


@pytest.mark.thorough
def test_a_full_disk_is_said_and_costs_no_record(tmp_path):
  with open_journal(tmp_path / "j") as book:
    book.append(0, 0, 0, make_rollout(0))
  before = (tmp_path / "j").read_bytes()
  code = """
    import resource, sys
    import test_journal
    book = test_journal.open_journal(test_journal.pathlib.Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
      book.append(0, 0, 1, test_journal.make_rollout(1))
    except OSError as error:
      print(error)
    assert book.keys() == ((0, 0, 0),), book.keys()
    """
  result = run_python(code, tmp_path / "j", len(before) + 50)
  assert result.returncode == 0, result.stderr
  assert "all earlier records are kept" in result.stdout
  assert (tmp_path / "j").read_bytes() == before


def test_what_is_appended_together_waits_for_the_disk_once_and_is_there_afterwards(tmp_path):
  code = """
    import os, sys
    import test_journal
    book = test_journal.open_journal(test_journal.pathlib.Path(sys.argv[1]))
    num_waits, fsync = 0, os.fsync
    def counted(descriptor):
      global num_waits
      num_waits += 1
      fsync(descriptor)
    os.fsync = counted
    with book.together():
      for member in range(5):
        with book.together():
          book.append(0, 0, member, test_journal.make_rollout(member))
        assert book.lookup(0, 0, member) is not None
      book.append_event({"event": "ended"})
      assert num_waits == 0
    assert num_waits == 1
    with book.together():
      pass
    assert num_waits == 1  # Nothing was written.
    book.append(0, 0, 5, test_journal.make_rollout(5))
    assert num_waits == 2
    os._exit(0)
    """
  result = run_python(code, tmp_path / "j")
  assert result.returncode == 0, result.stderr
  with open_journal(tmp_path / "j") as book:
    assert book.keys() == tuple((0, 0, member) for member in range(6))
    assert [*book.events()] == [{"event": "ended"}]


@pytest.mark.thorough
def test_a_disk_that_fills_while_records_wait_together_keeps_whole_ones(tmp_path):
  with open_journal(tmp_path / "j") as book:
    book.append(0, 0, 0, make_rollout(0))
  before = len((tmp_path / "j").read_bytes())
  code = """
    import resource, sys
    import test_journal
    book = test_journal.open_journal(test_journal.pathlib.Path(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
      with book.together():
        for member in range(1, 9):
          book.append(0, 0, member, test_journal.make_rollout(1))
    except OSError as error:
      print(error)
    """
  # Room for two more, and a part of the third.
  result = run_python(code, tmp_path / "j", 3 * before + 50)
  assert result.returncode == 0, result.stderr
  assert "all earlier records are kept" in result.stdout
  with open_journal(tmp_path / "j") as book:
    assert not book.truncated_bytes and book.keys()[0] == (0, 0, 0)
    assert 1 < len(book.keys()) < 9


def test_kill_minus_nine_leaves_every_acknowledged_record(tmp_path):
  code = """
    import sys
    import test_journal
    book = test_journal.open_journal(test_journal.pathlib.Path(sys.argv[1]))
    rollout = test_journal.make_rollout(length=20000)
    for member in range(10**6):
      book.append(0, 0, member, rollout)
      print(member, flush=True)
    """
  process = subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "j")],
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {"PYTHONPATH": PYTHONPATH},
  )
  acknowledged = [process.stdout.readline() for _ in range(5)]
  with pytest.raises(ValueError, match="another writer has open"):
    open_journal(tmp_path / "j")
  process.send_signal(signal.SIGKILL)
  acknowledged += process.stdout.readlines()
  process.wait()
  process.stdout.close()
  last = int([line for line in acknowledged if line.endswith("\n")][-1])
  with open_journal(tmp_path / "j") as book:
    assert book.keys()[: last + 1] == tuple((0, 0, member) for member in range(last + 1))
    assert_equal(book.lookup(0, 0, last).rollout, make_rollout(length=20000))


def test_the_parts_of_a_reward_come_back_and_older_records_have_none():
  parts = {"correct": 0.1 + 0.2, "format": -0.0}
  rollout = make_rollout(parts=parts)
  record = json.loads(json.dumps(journal_records.to_record(rollout)))
  assert_equal(journal_records.from_record(record), rollout)
  assert record["verdict"]["parts"] == parts
  del record["verdict"]["parts"]
  assert not journal_records.from_record(record).verdict.parts
  assert "parts" not in journal_records.to_record(make_rollout())["verdict"]
