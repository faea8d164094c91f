"""Grammar masks: pure functions of the tokens so far, and errors."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import re
import signal
import time

import numpy as np
import pytest
import word_engine

from seerjax.serve import grammar, grammar_workers
from seerjax.serve.protocol import Grammar
from seerjax.serve.refusals import Refusal


@pytest.fixture(scope="module")
def compiler():
  found = grammar.Compiler(word_engine.TOKENIZER, word_engine.CONFIG.vocab_size)
  yield found
  found.close()


def ids_of(mask: np.ndarray) -> set[int]:
  places = range(32 * mask.size)
  return {place for place in places if mask[place // 32] >> place % 32 & 1}


def test_a_mask_is_a_function_of_the_answer_alone(compiler):
  mask = compiler.mask(Grammar(kind="regex", source="[0-9]{2}", param="regex"))
  first = mask(())
  digits = ids_of(first)
  assert digits and len(digits) < word_engine.CONFIG.vocab_size
  one = min(digits)
  second = mask((one,))
  # Called again for an earlier completion, and for another branch.
  np.testing.assert_array_equal(mask(()), first)
  np.testing.assert_array_equal(mask.copy()((one,)), second)
  # Twin: the tokens read so far are part of the input.
  assert not np.array_equal(mask((one, one)), second)


def test_an_answer_that_is_none_of_the_grammar_is_refused(compiler):
  mask = compiler.mask(Grammar(kind="regex", source="[0-9]{2}", param="regex"))
  outside = min(set(range(word_engine.CONFIG.vocab_size)) - ids_of(mask(())))
  with pytest.raises(ValueError, match="regex: got a response of 1 tokens that its grammar"):
    mask((outside,))


def test_a_mask_follows_an_answer_that_continues_differently(compiler):
  digits = Grammar(kind="regex", source="[0-9]{3}", param="regex")
  mask, other = compiler.mask(digits).copy(), compiler.mask(digits)
  one = min(ids_of(mask(())))
  answer = (one, one, one)
  for count in range(4):
    np.testing.assert_array_equal(mask(answer[:count]), other(answer[:count]))
  before = mask.serial
  mask(answer)
  assert mask.serial == before  # The matcher was not called again.
  # After a failed step the completion continues differently.
  mask((one + 1,))
  np.testing.assert_array_equal(mask((one + 1, one)), other((one + 1, one)))
  np.testing.assert_array_equal(mask(()), other(()))


# One example of each kind of hostile grammar; `test_hostile_grammars.py` has more.
REFUSED = {
  "kills the library": ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "SIGSEGV"),
  "a reference to itself": ({"$ref": "#"}, "no text can continue"),
  "a reference to nothing": ({"$ref": "#/$defs/a"}, ""),
  "a reference elsewhere": ({"$ref": "http://example.com/a.json"}, ""),
  "no value": ({"enum": []}, ""),
  "a contradiction": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
  "no integer": ({"type": "integer", "minimum": 3, "maximum": 2}, ""),
  "a type that is none": ({"type": "number of apples"}, ""),
  "a keyword that is not supported": ({"not": {}}, "Unimplemented keys"),
  "many optional fields": (
    {"type": "object", "properties": {f"a{i}": {"type": "integer"} for i in range(2500)}}, "",
  ),
  "a pattern that is none": ({"type": "string", "pattern": "("}, ""),
  "a lone surrogate": ({"const": "\ud800"}, ""),
  "no text": (r"[^\s\S]", "no text can continue"),
  "a million letters": ("a{1000000}", ""),
  "a million million letters": ("(a{1000000}){1000000}", ""),
  "no expression": ("(", "at 1(8): invalid regex"),
  "a look back": (r"(?<=a)b", ""),
  "its own group": (r"(a)\1", ""),
  "a range that is none": ("[z-a]", ""),
  "deep nesting": ("(" * 5000 + "a" + ")" * 5000, ""),
  "a long source": ("a" * (grammar.MAX_SOURCE + 1), "expected at most 262144"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_grammar_that_cannot_be_used_is_refused_in_one_line(compiler, kind):
  source, reason = REFUSED[kind]
  asked = (
    Grammar(kind="regex", source=source, param="regex")
    if isinstance(source, str)
    else Grammar(kind="json", source=json.dumps(source), param="response_format")
  )
  for _ in range(3):  # A grammar that killed a worker is known by then.
    with pytest.raises(Refusal) as refused:
      compiler.mask(asked)
    message = refused.value.message
    assert refused.value.status == 400 and refused.value.param == asked.param
    assert len(message) <= 320 and message.isprintable(), message
    assert "got a grammar" in message and reason in message, message


# Workers that die.


def workers_of(compiler: grammar.Compiler, nice: int) -> list[int]:
  """Returns the processes of a compiler's workers of one kind."""
  server = compiler._server._process.pid
  children = pathlib.Path(f"/proc/{server}/task/{server}/children").read_text().split()
  nice = min(nice + os.nice(0), 19)
  stats = {int(one): pathlib.Path(f"/proc/{one}/stat").read_text() for one in children}
  return [one for one, stat in stats.items() if int(stat.rsplit(")", 1)[1].split()[16]) == nice]


def of_regex(source: str) -> Grammar:
  return Grammar(kind="regex", source=source, param="regex")


@pytest.fixture
def fresh(request):
  seconds = getattr(request, "param", 0.03)
  limits = grammar.Limits(mask_seconds=seconds, memory_bytes=1 << 28)
  found = grammar.Compiler(word_engine.TOKENIZER, word_engine.CONFIG.vocab_size, limits=limits)
  yield found
  found.close()


def test_a_worker_that_dies_ends_one_answer_and_the_others_go_on_by_the_same_masks(fresh, compiler):
  first, second, third = (fresh.mask(of_regex(f"[0-9]{{{count}}}")) for count in (7, 8, 9))
  digit = min(ids_of(first(())))
  first((digit,))
  (worker,) = workers_of(fresh, grammar.QUICK_NICE)
  os.kill(worker, signal.SIGSTOP)
  for mask in (first, second, third):
    mask.ask((digit, digit))
  fresh.gather(0)
  os.kill(worker, signal.SIGKILL)
  with pytest.raises(ValueError, match="regex: got a response of 2 tokens.*SIGKILL"):
    first((digit, digit))
  for mask, count in ((second, 8), (third, 9)):
    expected = compiler.mask(of_regex(f"[0-9]{{{count}}}"))
    np.testing.assert_array_equal(mask((digit, digit)), expected((digit, digit)))
    np.testing.assert_array_equal(mask((digit,) * 8), expected((digit,) * 8))
  # A grammar that killed one worker may be requested again, one that killed two may not.
  again = fresh.mask(of_regex("[0-9]{7}"))
  again((digit,))
  (worker,) = workers_of(fresh, grammar.QUICK_NICE)
  os.kill(worker, signal.SIGSTOP)
  again.ask((digit, digit))
  fresh.gather(0)
  os.kill(worker, signal.SIGKILL)
  with pytest.raises(ValueError, match="SIGKILL"):
    again((digit, digit))
  with pytest.raises(Refusal, match="SIGKILL"):
    fresh.mask(of_regex("[0-9]{7}"))


@pytest.mark.parametrize(
  "source, reason",
  [
    ("[xy][xy][xy]a{95000}", "it took more than"),  # The worker is ended,
    ("[xy][xy](.{1,400}){1,400}[z]", "too many"),  # or the library stops.
  ],
)
# The third mask takes 25 ms or more of CPU time on fast machines, the first two 3 ms on slow ones.
@pytest.mark.parametrize("fresh", [0.012], indirect=True)
def test_a_mask_that_takes_too_much_ends_its_answer(fresh, source, reason):
  mask = fresh.mask(of_regex(source))
  answer = word_engine.TOKENIZER.encode("xx")
  assert answer[0] in ids_of(mask(())) and answer[0] in ids_of(mask(answer[:1]))

  def go_on() -> None:
    for _ in range(400):
      allowed = ids_of(mask(answer))
      answer.append(answer[0] if answer[0] in allowed else min(allowed))

  with pytest.raises(ValueError, match=rf"regex: got a response of \d+ tokens that .*{reason}"):
    go_on()
  np.testing.assert_array_equal(*(fresh.mask(of_regex("[0-9]"))(()) for _ in range(2)))


def test_a_server_that_dies_is_started_again(fresh):
  mask = fresh.mask(of_regex("[0-9]{9}"))
  digit = min(ids_of(mask(())))
  before = mask((digit,))
  fresh._server._process.kill()
  for worker in workers_of(fresh, grammar.QUICK_NICE):
    os.kill(worker, signal.SIGKILL)
  fresh._server._process.wait()
  expected = ids_of(before)
  assert ids_of(mask((digit, digit))) == expected
  assert ids_of(fresh.mask(of_regex("[0-9]{10}"))(())) == expected


def test_a_tenants_grammars_are_new_to_all_others(fresh):
  asked = of_regex("[0-9]")
  first = fresh.mask(asked, "ana")
  assert fresh.is_tried(asked, "ana")
  assert not fresh.is_tried(asked, "ben") and not fresh.is_tried(asked)
  np.testing.assert_array_equal(first(()), fresh.mask(asked, "ben")(()))


def test_a_worker_that_is_used_up_is_replaced_though_masks_are_always_asked_for(fresh, compiler):
  asked = of_regex("[0-9]{9}")
  first, second = fresh.mask(asked), fresh.mask(asked)
  digit = min(ids_of(first(())))
  first((digit,))
  (worker,) = workers_of(fresh, grammar.QUICK_NICE)
  os.kill(worker, signal.SIGSTOP)
  first.ask((digit, digit))
  fresh.gather(0)
  line = fresh._lines[False]
  line.digests |= {str(one) for one in range(grammar_workers.MOST_COMPILED)}  # As if it had them.
  second.ask((digit,))
  fresh.gather(0)
  assert len(line.asked) == 1  # The second waits for a fresh worker.
  os.kill(worker, signal.SIGCONT)
  expected = compiler.mask(asked)
  np.testing.assert_array_equal(second((digit,)), expected((digit,)))
  np.testing.assert_array_equal(first((digit, digit)), expected((digit, digit)))
  assert fresh._lines[False] is not line


def test_workers_end_with_the_compiler(fresh):
  fresh.mask(of_regex("[0-9]"))((min(ids_of(fresh.mask(of_regex("[0-9]"))(()))),))
  server = fresh._server._process.pid
  workers = pathlib.Path(f"/proc/{server}/task/{server}/children").read_text().split()
  assert len(workers) == 2
  fresh.close()
  deadline = time.monotonic() + 10
  alive = [one for one in (str(server), *workers) if pathlib.Path(f"/proc/{one}").exists()]
  while alive and time.monotonic() < deadline:
    time.sleep(0.01)
    alive = [one for one in alive if pathlib.Path(f"/proc/{one}").exists()]
  assert not alive


def test_a_trial_that_takes_long_leaves_the_cores_to_others(fresh, compiler):
  fresh.mask(of_regex("[0-9]"))
  (worker,) = workers_of(fresh, grammar.TRIAL_NICE)
  os.kill(worker, signal.SIGSTOP)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    waiting = pool.submit(fresh.mask, of_regex("[0-9]{2}"))
    deadline = time.monotonic() + 10
    while workers_of(fresh, grammar.YIELDING_NICE) != [worker] and time.monotonic() < deadline:
      time.sleep(0.01)
    assert workers_of(fresh, grammar.YIELDING_NICE) == [worker]
    os.kill(worker, signal.SIGCONT)
    expected = compiler.mask(of_regex("[0-9]{2}"))
    np.testing.assert_array_equal(waiting.result()(()), expected(()))
  fresh.mask(of_regex("[0-9]{3}"))
  assert len(workers_of(fresh, grammar.TRIAL_NICE)) == 1  # Another, which has not yielded.
  # Linux shares the cores between sessions first: in one of their own workers would not be nice.
  assert os.getsid(fresh._server._process.pid) == os.getsid(0)


def test_a_worker_opens_no_file_and_is_told_no_variable_of_ours(fresh):
  fresh.mask(of_regex("[0-9]"))
  (worker,) = workers_of(fresh, grammar.TRIAL_NICE)
  limits = pathlib.Path(f"/proc/{worker}/limits").read_text()
  assert re.search(r"Max open files +5 +5 ", limits) and re.search(r"Max file size +0 ", limits)
  assert not re.search(r"Max address space +unlimited", limits)
  environment = pathlib.Path(f"/proc/{worker}/environ").read_text()
  names = {one.split("=")[0] for one in environment.split("\0")}
  assert names <= {"LANG", "PATH", "LD_LIBRARY_PATH", "LC_CTYPE", ""}
  assert len([*pathlib.Path(f"/proc/{worker}/fd").iterdir()]) == 5


@pytest.mark.parametrize("field", ["compile_seconds", "memory_bytes"])
def test_a_limit_that_is_none_is_refused(field):
  with pytest.raises(ValueError, match=f"grammar.Limits.{field}: got 0, expected more than 0"):
    grammar.Limits(**{field: 0})
