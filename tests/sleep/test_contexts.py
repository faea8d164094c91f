"""Contexts and their rewrites: versions, namespaces, time, quarantine, and state after a kill."""

from __future__ import annotations

import collections
import dataclasses
import errno
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import small_files

from seerjax.sleep import contexts as contexts_lib
from seerjax.sleep.contexts import Context, Contexts, Dropped, Identity, Rewrite

NANO = Identity(weights="w", tokenizer="t", template="c")
ROOT = pathlib.Path(__file__).parents[2]


def tokens(text: str) -> list[int]:
  return [*text.encode("utf-8", "replace")]


def registered(
  registry: Contexts, text: str, *, name="c", space="mine", step=0, ttl=None
) -> Context:
  return registry.register(space, name, text, tokens(text), step=step, ttl_steps=ttl)


def rewrite_of(context: Context, text: str, *, job=0, seed=1, policy_version=0) -> Rewrite:
  return Rewrite(
    context_id=context.context_id, version=context.version, job=job, seed=seed,
    policy_version=policy_version, num_tokens=len(text), text=text,
  )  # fmt: skip


def test_an_id_is_of_tokens_weights_tokenizer_and_template():
  ids = {
    contexts_lib.context_id(ids, dataclasses.replace(NANO, **fields))
    for ids, fields in (
      ([1, 2], {}), ([12], {}), ([2, 1], {}), ([1, 2], {"weights": "x"}),
      ([1, 2], {"tokenizer": "x"}), ([1, 2], {"template": "x"}),
    )
  }  # fmt: skip
  assert len(ids) == 6
  assert contexts_lib.context_id((1, 2), NANO) in ids


def test_rewrites_end_with_their_version(tmp_path: pathlib.Path):
  dropped: list[Dropped] = []
  with Contexts(tmp_path, identity=NANO, on_drop=dropped.append) as registry:
    first = registered(registry, "Ana has 2 pens.")
    kept = registry.keep("mine", "c", rewrite_of(first, "Ana has 2.", job=1), step=0)
    other = registry.keep("mine", "c", rewrite_of(first, "Two pens.", job=0, seed=7), step=1)
    assert registry.rewrites("mine", "c", step=1) == (other, kept)
    # The same text again is the same version.
    again = registered(registry, "Ana has 2 pens.", step=2, ttl=5)
    assert (again.version, again.registered_step, again.expires_step) == (1, 0, 7)
    assert registry.rewrites("mine", "c", step=2) == (other, kept)
    # A repeated job replaces its earlier rewrite.
    anew = registry.keep("mine", "c", rewrite_of(first, "2 pens.", job=1, policy_version=3), step=2)
    assert registry.rewrites("mine", "c", step=2) == (other, anew)
    assert anew is not None and anew.policy_version == 3
    second = registered(registry, "Ana has 3 pens.", step=3)
    assert second.version == 2 and registry.rewrites("mine", "c", step=3) == ()
    assert dropped == [Dropped("mine", "c", first.context_id, 1, "edited")]
    # A rewrite of the old version is refused; so is one after an edit and its reversal.
    assert registry.keep("mine", "c", rewrite_of(first, "Ana has 2."), step=4) is None
    third = registered(registry, "Ana has 2 pens.", step=4)
    assert third.context_id == first.context_id and third.version == 3
    assert registry.keep("mine", "c", rewrite_of(first, "Ana has 2."), step=4) is None
    assert registry.rewrites("mine", "c", step=4) == ()
    assert registry.counts.stale == 2 and registry.counts.edited == 2
    assert not [*tmp_path.glob("rewrites/*/*")]


def test_what_is_forgotten_or_over_is_unknown(tmp_path: pathlib.Path):
  dropped: list[Dropped] = []
  with Contexts(tmp_path, identity=NANO, on_drop=dropped.append) as registry:
    context = registered(registry, "a", ttl=3)
    registry.keep("mine", "c", rewrite_of(context, "r"), step=2)
    assert registry.get("mine", "c", step=2) == context
    with pytest.raises(ValueError, match="got the name 'c', which is unknown in this namespace"):
      registry.get("mine", "c", step=3)
    assert registry.keep("mine", "c", rewrite_of(context, "r"), step=3) is None
    later = registered(registry, "a", step=3)
    assert later.version == 2
    registry.forget("mine", "c", step=4)
    for act in (registry.get, registry.rewrites, registry.quarantine, registry.forget):
      with pytest.raises(ValueError, match="got the name 'c', which is unknown in this namespace"):
        act("mine", "c", step=4)
    assert registered(registry, "a", step=5).version == 3
  assert [(one.version, one.why) for one in dropped] == [(1, "expired"), (2, "forgotten")]


def test_namespaces_share_nothing(tmp_path: pathlib.Path):
  with Contexts(tmp_path, identity=NANO) as registry:
    ours = registered(registry, "a", space="ours")
    registry.keep("ours", "c", rewrite_of(ours, "r"), step=0)
    messages = []
    for space, name in (("theirs", "c"), ("theirs", "nobodys")):
      with pytest.raises(ValueError) as found:
        registry.rewrites(space, name, step=0)
      messages.append(str(found.value).replace(repr(name), "..."))
    assert messages[0] == messages[1]  # Same message as for a context that does not exist.
    theirs = registered(registry, "a", space="theirs")
    assert theirs.context_id == ours.context_id
    assert registry.rewrites("theirs", "c", step=0) == ()
    registry.keep("theirs", "c", rewrite_of(theirs, "r"), step=0)
    assert len([*tmp_path.glob("rewrites/*/*")]) == 2
    registry.forget("theirs", "c", step=0)
    assert [one.text for one in registry.rewrites("ours", "c", step=0)] == ["r"]
    assert registry.names("ours", step=0) == ("c",) and registry.names("theirs", step=0) == ()


def test_false_equations_put_a_rewrite_in_quarantine(tmp_path: pathlib.Path):
  for _ in range(2):  # Also after a restart.
    with Contexts(tmp_path, identity=NANO) as registry:
      context = registered(registry, "a")
      if not registry.rewrites("mine", "c", step=0):
        registry.keep("mine", "c", rewrite_of(context, "12+7=19", job=0), step=0)
        registry.keep("mine", "c", rewrite_of(context, "12+7=18", job=1), step=0)
        assert registry.counts.quarantined == 1
      assert [one.text for one in registry.rewrites("mine", "c", step=0)] == ["12+7=19"]
      (bad,) = registry.quarantine("mine", "c", step=0)
      assert bad.text == "12+7=18" and bad.false_equations == ("12+7=18",)


@pytest.mark.parametrize("spoil", ["cut", "flip", "gone"])
def test_a_rewrite_whose_bytes_changed_is_dropped_and_said(tmp_path: pathlib.Path, spoil: str):
  with Contexts(tmp_path, identity=NANO) as registry:
    context = registered(registry, "a")
    for job, text in enumerate(("one", "two")):
      registry.keep("mine", "c", rewrite_of(context, text, job=job), step=0)
  (path,) = [p for p in tmp_path.glob("rewrites/*/*") if p.read_text() == "one"]
  if spoil == "gone":
    path.unlink()
  else:
    path.write_text("on" if spoil == "cut" else "ome")
  for _ in range(2):
    with Contexts(tmp_path, identity=NANO) as registry:
      assert [one.text for one in registry.rewrites("mine", "c", step=0)] == ["two"]
      if registry.messages:
        (sentence,) = registry.messages
        assert registry.counts.damaged == 1
  assert re.search(r"got \d bytes that do not match their checksum, expected the rewrite of job 0",
                   sentence)  # fmt: skip
  with Contexts(tmp_path, identity=NANO) as registry:
    registry.keep("mine", "c", rewrite_of(context, "one", job=0), step=0)  # Slept again.
    assert len(registry.rewrites("mine", "c", step=0)) == 2


class Model:
  """The expected content of a registry, kept in dictionaries."""

  def __init__(self):
    self.texts: dict[str, str] = {}
    self.versions: collections.Counter[str] = collections.Counter()
    self.expires: dict[str, float] = {}
    self.rewrites: dict[str, dict[int, str]] = {}

  def advance(self, step: int) -> None:
    for name in [name for name, end in self.expires.items() if end <= step]:
      self.drop(name)

  def drop(self, name: str) -> None:
    del self.texts[name], self.expires[name], self.rewrites[name]


def fuzz(
  directory: pathlib.Path, rng: random.Random, num: int, kind: type[Contexts] = Contexts
) -> collections.Counter[str]:
  """Draws edits, sleeps, reads, expiries, forgets, kills and restarts; counts what happened."""
  events: collections.Counter[str] = collections.Counter()
  model, step = Model(), 0
  pinned: dict[str, tuple[str, int]] = {}  # A cache's content, by name.

  def drop(gone: Dropped) -> None:
    assert pinned.pop(gone.name) == (gone.context_id, gone.version)
    events[gone.why] += 1

  registry = kind(directory, identity=NANO, on_drop=drop)
  old: list[tuple[str, Rewrite]] = []
  for _ in range(num):
    step += rng.randrange(3)
    model.advance(step)
    name = rng.choice("abcd")
    what = rng.choice(("edit", "edit", *["keep"] * 6, "forget", "restart", "kill"))
    if what == "edit":
      text, ttl = f"text {rng.randrange(3)}", rng.choice((None, 4, 19))
      is_same = model.texts.get(name) == text
      context = registered(registry, text, name=name, step=step, ttl=ttl)
      if not is_same:
        model.versions[name] += 1
        model.rewrites[name] = {}
      model.texts[name] = text
      model.expires[name] = float("inf") if ttl is None else step + ttl
      assert context.version == model.versions[name]
      pinned[name] = (context.context_id, context.version)
      events["same" if is_same else "new"] += 1
    elif what == "keep" and name in model.texts:
      context = registry.get("mine", name, step=step)
      fresh = rewrite_of(context, f"{context.text}, v{context.version}", job=rng.randrange(3))
      old.append((name, fresh))
      target, offered = rng.choice((old[-1], *old[-9:]))
      is_current = target in model.texts and model.versions[target] == offered.version
      kept = registry.keep("mine", target, offered, step=step)
      assert (kept is not None) == is_current
      if is_current:
        model.rewrites[target][offered.job] = offered.text
      events["kept" if is_current else "stale refused"] += 1
    elif what == "forget" and name in model.texts:
      registry.forget("mine", name, step=step)
      model.drop(name)
    elif what in ("restart", "kill"):
      registry.close()
      if what == "kill":  # In the middle of an event, and of a rewrite's file.
        with open(directory / "contexts.jsonl", "ab") as file:
          file.write(b'{"crc32":"0123'[: rng.randrange(1, 14)])
        stray = directory / "rewrites" / "x" / f"{rng.randrange(99)}.txt.new"
        stray.parent.mkdir(parents=True, exist_ok=True)
        stray.write_text("half")
      pinned.clear()  # Pages and drafts are memory.
      registry = kind(directory, identity=NANO, on_drop=drop)
      assert registry.last_step <= step
      pinned |= {
        name: (registry.get("mine", name, step=registry.last_step).context_id, model.versions[name])
        for name in registry.names("mine", step=registry.last_step)
      }
      events[what] += 1
    for name in model.texts:
      found = registry.rewrites("mine", name, step=step)
      assert {one.job: one.text for one in found} == model.rewrites[name]
      assert all(one.version == model.versions[name] for one in found)
      events["read"] += len(found)
    assert registry.names("mine", step=step) == tuple(sorted(model.texts))
    assert set(pinned) == set(model.texts)
  registry.close()
  assert len([*directory.glob("rewrites/*/*")]) == sum(map(len, model.rewrites.values()))
  return events


def test_nothing_stale_is_served_whatever_happens(tmp_path: pathlib.Path, seed: int):
  events = fuzz(tmp_path, random.Random(seed), 150)
  print(dict(events))
  assert events["read"] > 0 and events["stale refused"] > 0


@pytest.mark.thorough
def test_nothing_stale_is_served_in_a_thousand_drawn_events(tmp_path: pathlib.Path, seed: int):
  events = fuzz(tmp_path, random.Random(seed), 1500)
  print(dict(events))
  wanted = ("new", "same", "edited", "expired", "forgotten", "kill", "restart", "stale refused")
  assert all(events[what] >= 20 for what in wanted), events


KILLED = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, *({str(ROOT / "tests")!r} + at for at in ("/sleep", "/support"))]
from test_contexts import *
directory = pathlib.Path(sys.argv[1])
with Contexts(directory, identity=NANO) as registry:
  number = registry.last_step
  while True:
    number += 1
    context = registered(registry, f"text {{number // 5}}", name=f"c{{number % 2}}", step=number)
    kept = registry.keep("mine", context.name, rewrite_of(context, "r" * 5000), step=number)
    print(number, context.name, context.version, flush=True)
"""


@pytest.mark.parametrize(
  "kills",
  [pytest.param(5, marks=pytest.mark.thorough), pytest.param(20, marks=pytest.mark.long)],
)
def test_after_a_kill_at_any_moment_finished_rewrites_are_there(
  tmp_path: pathlib.Path, seed: int, kills: int
):
  rng, directory = random.Random(seed), tmp_path / "registry"
  num_rewrites = 0
  for _ in range(kills):
    process = subprocess.Popen(
      [sys.executable, "-c", KILLED, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline()]  # The process has started.
    time.sleep(rng.random() * 0.05)
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    whole = [line.split() for line in lines if line.endswith("\n")]
    num_rewrites += len(whole)
    with Contexts(directory, identity=NANO) as registry:
      number, name, version = whole[-1]
      context = registry.get("mine", name, step=registry.last_step)
      # At most the event in progress follows the last printed one.
      assert int(number) <= registry.last_step <= int(number) + 1
      assert context.version - int(version) in (0, 1)
      if context.version == int(version):
        (kept,) = registry.rewrites("mine", name, step=registry.last_step)
        assert kept.text == "r" * 5000
      assert not registry.messages
  print(f"{num_rewrites} rewrites in {kills} lives")


def refusals(registry: Contexts):
  yield lambda: registered(registry, " "), "got an empty context 'c', expected at least one charac"
  yield lambda: registered(registry, "\ud800"), "got a context 'c' with a lone surrogate at offset"
  yield (
    lambda: registry.register("mine", "c", "x" * (5 << 20), [1], step=0),
    "got a context 'c' of 5242880 bytes, expected at most 4194304; split it.",
  )
  yield lambda: registered(registry, "a", name=""), "got the namespace 'mine' and the name '', exp"
  yield lambda: registered(registry, "a", ttl=0), "register: got ttl_steps=0, expected at least 1"
  no_token = lambda: registry.register("mine", "c", "a", [], step=0)
  yield no_token, "context_id: got no token, expected at least one; an empty context needs"
  good = registered(registry, "a", step=5)
  yield lambda: registered(registry, "a", step=4), "contexts: got step 4, expected at least 5, the"
  blank = lambda: registry.keep("mine", "c", rewrite_of(good, " "), step=5)
  yield blank, "contexts: got an empty rewrite, expected at least one character that is not a space"
  registered(registry, "a", name="d", step=5)
  third = lambda: registered(registry, "a", name="e", step=5)
  yield third, "register: got a new context for a namespace that has 2, the limit"


def test_bad_input_is_refused(tmp_path: pathlib.Path):
  with Contexts(tmp_path, identity=NANO, max_contexts=2) as registry:
    for act, message in refusals(registry):
      with pytest.raises(ValueError, match=re.escape(message)):
        act()
    with pytest.raises(ValueError, match="got a journal that another writer has open"):
      Contexts(tmp_path, identity=NANO)
  with pytest.raises(ValueError, match="got a record for a closed registry, expected an open one"):
    registered(registry, "b", step=9)
  other = dataclasses.replace(NANO, weights="w2")
  with pytest.raises(ValueError, match="of a model whose weights is 'w', expected 'w2'; load that"):
    Contexts(tmp_path, identity=other)
  with pytest.raises(ValueError, match="Contexts.max_contexts: got 0, expected at least 1; 10000"):
    Contexts(tmp_path, identity=NANO, max_contexts=0)
  path = tmp_path / "contexts.jsonl"
  with pytest.raises(ValueError, match="jsonl: got a file, expected a directory of contexts"):
    Contexts(path, identity=NANO)
  lines = path.read_bytes().split(b"\n")
  path.write_bytes(b"\n".join([lines[0], b"{}", *lines[2:]]))
  with pytest.raises(ValueError, match="got a damaged record in line 2 .* with more records"):
    Contexts(tmp_path, identity=NANO)
  path.write_text("mine\n")
  with pytest.raises(ValueError, match="as the first record, expected a registry of contexts of f"):
    Contexts(tmp_path, identity=NANO)
  assert path.read_text() == "mine\n"


def test_a_full_disk_is_refused_and_leaves_what_was_there(tmp_path: pathlib.Path):
  registry = Contexts(tmp_path, identity=NANO)
  context = registered(registry, "a")
  kept = registry.keep("mine", "c", rewrite_of(context, "r"), step=0)
  size = os.path.getsize(registry.path)
  with small_files.bounded(size + 20):
    with pytest.raises(OSError, match="free some space and resume") as found:
      registry.keep("mine", "c", rewrite_of(context, "small", job=1), step=0)
    with pytest.raises(OSError, match="expected enough disk space; free some and sleep again"):
      registry.keep("mine", "c", rewrite_of(context, "large" * size, job=1), step=0)
  assert found.value.errno == errno.EFBIG
  assert registry.rewrites("mine", "c", step=0) == (kept,)
  assert registry.keep("mine", "c", rewrite_of(context, "s", job=1), step=0) is not None
  registry.close()
  registry.close()
  with Contexts(tmp_path, identity=NANO) as again:
    assert [one.text for one in again.rewrites("mine", "c", step=0)] == ["r", "s"]
    assert len([*tmp_path.glob("rewrites/*/*")]) == 2


def test_a_registry_that_takes_a_late_sleepers_rewrite_is_seen(tmp_path: pathlib.Path, seed: int):
  """Twin: rewrites of version n are kept for n + 1, and the fuzz test fails."""

  class Careless(Contexts):
    def keep(self, namespace, name, rewrite, *, step):
      if name not in self.names(namespace, step=step):
        return super().keep(namespace, name, rewrite, step=step)
      now = self.get(namespace, name, step=step)
      passed = dataclasses.replace(rewrite, context_id=now.context_id, version=now.version)
      return super().keep(namespace, name, passed, step=step)

  with pytest.raises(AssertionError):
    fuzz(tmp_path, random.Random(seed), 600, Careless)


def test_a_registry_that_keeps_what_is_over_is_seen(tmp_path: pathlib.Path, seed: int):
  """Twin: time never passes, and the fuzz test fails."""

  class Timeless(Contexts):
    def register(self, *args, ttl_steps=None, **fields):
      return super().register(*args, **fields)

  with pytest.raises(AssertionError):
    fuzz(tmp_path, random.Random(seed), 600, Timeless)
