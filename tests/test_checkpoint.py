"""A checkpoint is restored bit for bit or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

from equal_trees import assert_equal_bits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seerjax import checkpoint
from seerjax.types import TrainState

FINGERPRINT = {"row_tile": "16", "jax_version": "0.12", "digest": "aaaa"}
OTHER = {"row_tile": "64", "jax_version": "0.12", "digest": "bbbb"}
HOST = {"position": 12, "name": "nano", "rates": [0.1, 1e-3], "done": False, "none": None}


def make_state(seed: int = 0):
  bits = np.random.default_rng(seed).integers(0, 2**16, (5, 3), np.uint16)
  params = {
    "embed": jnp.asarray(bits).view(jnp.bfloat16),  # Every kind of bfloat16, NaN payloads included.
    "layers": [{"w": jnp.arange(6.0).reshape(2, 3) / 7}, {"w": jnp.full((2, 3), -0.0)}],
  }
  optimizer = optax.adam(optax.linear_schedule(1.0, 0.0, 9))
  return {
    "train": TrainState(params=params, opt_state=optimizer.init(params), step=jnp.int32(seed)),
    "key": jax.random.key(seed),
    "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
    "lora": jnp.zeros((0, 4)),
    "counts": np.arange(3, dtype=np.int64),
    "nothing": None,
  }


def abstract(state):
  return jax.tree.map(
    lambda x: x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype), state
  )


def save(directory, step, state=None, **changes):
  state = make_state(step) if state is None else state
  options = dict(host_state=HOST, fingerprint=FINGERPRINT) | changes
  return checkpoint.save(directory, step, state, **options)


def restore(directory, state=None, **changes):
  state = abstract(make_state()) if state is None else state
  return checkpoint.restore(directory, state, **(dict(fingerprint=FINGERPRINT) | changes))


def test_every_bit_comes_back(tmp_path):
  state = make_state(3)
  save(tmp_path / "c", 3, state)
  restored = restore(tmp_path / "c")
  assert_equal_bits(restored.state, state)
  assert isinstance(restored.state["counts"], np.ndarray)
  assert (restored.step, restored.host_state) == (3, HOST)
  assert restored.epochs == (checkpoint.Epoch(0, FINGERPRINT),)
  assert_equal_bits(restore(tmp_path / "c", make_state(0)).state, state)  # Concrete arrays do too.


def test_arrays_are_placed_by_their_shardings(tmp_path):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
  state = {"w": jnp.arange(8.0)}
  save(tmp_path, 0, state)
  wanted = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
  restored = restore(tmp_path, wanted).state
  assert restored["w"].sharding == sharding
  assert_equal_bits(restored, state)


def test_the_latest_and_every_kth_are_kept(tmp_path):
  assert checkpoint.latest_step(tmp_path / "none") is None
  for step in range(7):
    save(tmp_path, step, {"w": jnp.full(2, step)}, keep_latest=2, keep_every=3)
  assert checkpoint.steps(tmp_path) == (0, 3, 5, 6)
  assert checkpoint.latest_step(tmp_path) == 6
  assert restore(tmp_path, {"w": jnp.zeros(2, int)}, step=3).state["w"][0] == 3
  assert sorted(os.listdir(tmp_path))[0].startswith("step_")  # Nothing hidden is left.


def test_a_step_that_is_not_there_is_refused(tmp_path):
  save(tmp_path, 2)
  with pytest.raises(ValueError, match=re.escape("got step 7 of") + r".*expected one of \(2,\)"):
    restore(tmp_path, step=7)


def test_a_part_is_read_by_its_name_and_the_state_without_it(tmp_path):
  state, part = make_state(), make_state(1)
  save(tmp_path, 1, state)
  save(tmp_path, 2, state, parts={"draft": part})
  assert_equal_bits(restore(tmp_path).state, state)
  assert_equal_bits(checkpoint.restore_part(tmp_path, "draft", abstract(part)), part)
  assert checkpoint.restore_part(tmp_path, "other", abstract(part)) is None
  assert checkpoint.restore_part(tmp_path, "draft", abstract(part), step=1) is None
  with pytest.raises(ValueError, match="got other leaves than those of this run .*keys: got key"):
    checkpoint.restore_part(tmp_path, "draft", {"key": jax.random.key(0)})
  for name in ("state", "a/b"):
    with pytest.raises(ValueError, match=f"got a part named '{name}', expected letters only"):
      save(tmp_path, 3, parts={name: part})
  nan = {"w": jnp.full(2, jnp.nan)}
  with pytest.raises(ValueError, match="draft of step 3: got"):
    save(tmp_path, 3, parts={"draft": nan})
  file = next(path for path in (tmp_path / "step_00000002" / "draft").rglob("*") if path.is_file())
  file.unlink()
  for read in (
    lambda: checkpoint.restore_part(tmp_path, "draft", abstract(part)),
    lambda: restore(tmp_path),
  ):
    with pytest.raises(ValueError, match="got no file, expected"):
      read()


def test_a_step_is_saved_once(tmp_path):
  save(tmp_path, 2)
  with pytest.raises(ValueError, match="got step 2, which .* already holds"):
    save(tmp_path, 2)


def test_another_fingerprint_is_refused_or_recorded(tmp_path):
  save(tmp_path, 1)
  with pytest.raises(ValueError, match="row_tile was '16' and is '64'"):
    restore(tmp_path, fingerprint=OTHER)
  with pytest.raises(ValueError, match="row_tile was '16' and is '64'"):
    save(tmp_path, 2, fingerprint=OTHER)
  both = (checkpoint.Epoch(0, FINGERPRINT), checkpoint.Epoch(1, OTHER))
  assert restore(tmp_path, fingerprint=OTHER, accept_new_numerics=True).epochs == both
  save(tmp_path, 2, fingerprint=OTHER, accept_new_numerics=True)
  save(tmp_path, 3, fingerprint=OTHER)
  assert restore(tmp_path, fingerprint=OTHER).epochs == both


def test_other_leaves_are_refused_by_path(tmp_path):
  save(tmp_path, 0, {"a": {"w": jnp.zeros((2, 3))}, "b": jnp.zeros(2), "k": jax.random.key(0)})
  wanted = {
    "a": {"w": jnp.zeros((3, 2)), "v": jnp.zeros(1)},
    "b": jnp.zeros(2, jnp.bfloat16),
    "k": jax.random.key(0, impl="rbg"),
  }
  with pytest.raises(ValueError, match="other leaves than those of this run") as caught:
    restore(tmp_path, wanted)
  for text in (
    "a/v: got nothing, expected float32[1]",
    "a/w: got float32[2, 3], expected float32[3, 2]",
    "b: got float32[2], expected bfloat16[2]",
    "k: got key<fry>[], expected key<rbg>[]",
  ):
    assert text in str(caught.value)


def test_leaves_that_are_no_arrays_are_refused(tmp_path):
  with pytest.raises(ValueError, match="state: got float 0.5 at 'opt/0', expected an array"):
    save(tmp_path, 0, {"opt": (0.5,)})
  with pytest.raises(ValueError, match="two leaves that are both named 'a/b'"):
    save(tmp_path, 0, {"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)})
  assert checkpoint.latest_step(tmp_path) is None


def test_host_state_that_json_would_change_is_refused(tmp_path):
  for value, message in (
    ({"a": [1, (2,)]}, r"got tuple \(2,\) at host_state\['a'\]\[1\]"),
    ({"a": float("nan")}, r"got float nan at host_state\['a'\]"),
    ({"a": np.float32(1)}, r"got float32 .* at host_state\['a'\]"),
    ({"a": np.float64(1)}, r"got float64 .* at host_state\['a'\]"),
    ({"a": {1: 2}}, r"got the key 1 in host_state\['a'\]"),
  ):
    with pytest.raises(ValueError, match=message):
      save(tmp_path, 0, {"w": jnp.zeros(1)}, host_state=value)


def refuse_damaged(directory, file, damage, message):
  """Restores with other contents of one file, None for no file; then puts it back."""
  whole = file.read_bytes()
  file.unlink()
  if damage is not None:
    file.write_bytes(damage)
  with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: {message}"):
    restore(directory, {"w": jnp.zeros(64)})
  file.write_bytes(whole)


def test_damage_of_any_file_is_refused_by_its_name(tmp_path):
  path = save(tmp_path, 0, {"w": jnp.arange(64.0)})
  files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.stat().st_size]
  files.remove(path / checkpoint.DESCRIPTION)
  assert any("ocdbt" in str(file) for file in files)
  for file in files:
    whole = file.read_bytes()
    size = len(whole)
    altered = bytearray(whole)
    altered[size // 2] ^= 1
    for damage, message in (
      (whole[:-1], f"got {size - 1} bytes, expected {size}; the file is truncated: there is no"),
      (
        bytes(altered),
        f"got contents of sha256 {hashlib.sha256(altered).hexdigest()[:16]}, expected"
        f" {hashlib.sha256(whole).hexdigest()[:16]}; the file was altered: there is no other",
      ),
      (None, f"got no file, expected {size} bytes; the checkpoint is incomplete: there is no"),
    ):
      refuse_damaged(tmp_path, file, damage, message)
  restore(tmp_path, {"w": jnp.zeros(64)})


def test_damage_of_the_description_is_refused_by_its_name(tmp_path):
  file = save(tmp_path, 0, {"w": jnp.arange(64.0)}) / checkpoint.DESCRIPTION
  whole = file.read_bytes()
  digest = json.loads(whole)["sha256"][:16]
  end = "expected the description of a checkpoint; the file is truncated or missing: there is no"
  step = whole.replace(b'"step": 0', b'"step": 1', 1)
  assert step != whole
  for damage, message in (
    # Without its last newline alone it would be whole.
    (whole[:-3], rf"got a file that cannot be read \(JSONDecodeError\(.*\)\), {end}"),
    (b"[" + whole[1:], rf"got a file that cannot be read \(JSONDecodeError\(.*\)\), {end}"),
    (b"[]", rf"got a file that cannot be read \(TypeError\(.*\)\), {end}"),
    (b"{}", rf"got a file that cannot be read \(KeyError\('sha256'\)\), {end}"),
    (b"\xff" + whole, rf"got a file that cannot be read \(UnicodeDecodeError\(.*\)\), {end}"),
    (None, rf"got a file that cannot be read \(FileNotFoundError\(.*\)\), {end}"),
    (step, rf"got contents of sha256 [0-9a-f]{{16}}, expected {digest}; the file was altered: the"),
  ):
    refuse_damaged(tmp_path, file, damage, message)
  restore(tmp_path, {"w": jnp.zeros(64)})


def test_without_the_damaged_newest_one_the_one_before_is_restored(tmp_path):
  for step in (2, 3):
    path = save(tmp_path, step, {"w": jnp.full(64, float(step))})
  (path / checkpoint.DESCRIPTION).write_text("{}")
  message = rf"missing: remove {re.escape(str(path))} to resume from step 2\."
  with pytest.raises(ValueError, match=message):
    restore(tmp_path, {"w": jnp.zeros(64)})
  shutil.rmtree(path)
  assert restore(tmp_path, {"w": jnp.zeros(64)}).step == 2


def test_damaged_checkpoints_are_set_aside_as_long_as_there_is_one_before(tmp_path):
  for step in (2, 3, 4):
    path = save(tmp_path, step, {"w": jnp.full(64, float(step))})
  assert checkpoint.set_aside_damaged(tmp_path) == []
  (path / checkpoint.DESCRIPTION).write_text("{}")
  [message] = checkpoint.set_aside_damaged(tmp_path)
  assert message.startswith("DAMAGED CHECKPOINT of step 4: ") and "cannot be read" in message
  assert message.endswith("renamed to damaged_step_00000004, and the run resumes from step 3.")
  assert checkpoint.steps(tmp_path) == (2, 3)
  # The same step again, and the one before it.
  path = save(tmp_path, 4, {"w": jnp.full(64, 4.0)}, keep_latest=3)
  for step in (3, 4):
    files = (tmp_path / f"step_{step:08d}").rglob("*")
    file = next(one for one in files if one.is_file() and one.stat().st_size > 99)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
  messages = checkpoint.set_aside_damaged(tmp_path)
  assert [one.partition(":")[0][-6:] for one in messages] == ["step 4", "step 3"]
  assert (tmp_path / "damaged_step_00000004_2").is_dir()
  # The last one left is refused, and stays where it is.
  (tmp_path / "step_00000002" / checkpoint.DESCRIPTION).unlink()
  assert checkpoint.set_aside_damaged(tmp_path) == []
  with pytest.raises(ValueError, match=r"there is no other checkpoint; restore it from a copy"):
    restore(tmp_path, {"w": jnp.zeros(64)})


def test_another_format_is_refused(tmp_path):
  file = save(tmp_path, 0, {"w": jnp.zeros(1)}) / checkpoint.DESCRIPTION
  description = json.loads(file.read_text())
  del description["sha256"]
  description["format"] = 99
  text = json.dumps(description, sort_keys=True)
  description["sha256"] = hashlib.sha256(text.encode()).hexdigest()
  file.write_text(json.dumps(description))
  with pytest.raises(ValueError, match="got format 99, expected 1"):
    restore(tmp_path, {"w": jnp.zeros(1)})
  file.parent.rename(file.parent.with_name("step_00000002"))
  save(tmp_path, 1, {"w": jnp.zeros(1)})
  with pytest.raises(ValueError, match="got format 99, expected 1"):
    checkpoint.set_aside_damaged(tmp_path)  # It is whole.


def start_python(code: str, *arguments: object) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
  )


def test_ctrl_c_within_a_save_waits_until_it_is_whole(tmp_path, capfd):
  state = {str(i): jnp.full((512, 512), i) for i in range(8)}
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))

  def go_on() -> None:
    timer.start()
    for step in range(100):
      save(tmp_path, step, state, fingerprint={"a": "b"})

  try:
    with pytest.raises(KeyboardInterrupt):
      go_on()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  finally:
    timer.cancel()
    signal.signal(signal.SIGINT, before)
  assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
  assert restore(tmp_path, state, fingerprint={"a": "b"}).step == checkpoint.latest_step(tmp_path)
  assert "Traceback" not in capfd.readouterr().err


@pytest.mark.thorough
def test_kill_minus_nine_at_any_moment_leaves_whole_checkpoints(tmp_path):
  code = """
    import sys
    import jax.numpy as jnp
    from seerjax import checkpoint
    directory, first = sys.argv[1], int(sys.argv[2])
    for step in range(first, first + 10**6):
      state = {str(i): jnp.full((256, 256), step) for i in range(8)}
      checkpoint.save(
        directory, step, state, host_state={"step": step}, fingerprint={"a": "b"}, keep_latest=2)
      print(step, flush=True)
    """
  wanted = {str(i): jnp.zeros((256, 256), jnp.int32) for i in range(8)}
  first = 0
  for delay in (0.0, 0.05, 0.11):
    process = start_python(code, tmp_path, first)
    step = int(process.stdout.readline())  # One is published, and the next is going on.
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    rest = [int(line) for line in process.communicate()[0].splitlines() if line]
    last = max([step, *rest])
    found = checkpoint.latest_step(tmp_path)
    assert found in (last, last + 1)  # The kill may come between the rename and the print.
    restored = checkpoint.restore(tmp_path, wanted, fingerprint={"a": "b"})
    assert restored.host_state == {"step": found}
    assert all((leaf == found).all() for leaf in restored.state.values())
    first = found + 1
  save(tmp_path, first, {"w": jnp.zeros(1)}, fingerprint={"a": "b"})
  assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.thorough
@pytest.mark.parametrize(
  "num, message",
  [
    (10**6, "while step 1 was saved, expected room for it; free some space, and"),
    # There is room for the arrays, but not for their description.
    (10, "bytes free), expected room for it; free some space and resume: all earlier results"),
  ],
)
def test_a_save_that_fails_leaves_nothing_behind(tmp_path, num, message):
  code = """
    import resource, sys
    import jax.numpy as jnp
    from seerjax import checkpoint
    def save(step):
      checkpoint.save(
        sys.argv[1], step, {"w": jnp.arange(int(sys.argv[2]))}, host_state={"text": "x" * 10**5},
        fingerprint={"a": "b"})
    save(0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    try:
      save(1)
    except OSError as error:
      print("refused:", error)
    """
  process = start_python(code, tmp_path, num)
  out, err = process.communicate(timeout=120)
  assert message in out, err
  assert "Traceback" not in err + out
  assert os.listdir(tmp_path) == ["step_00000000"]
  restore(tmp_path, {"w": jnp.zeros(num, jnp.int32)}, fingerprint={"a": "b"})


def test_steps_that_are_named_are_kept_besides_the_latest(tmp_path):
  for step in range(6):
    kept = (1,) if step < 4 else (3,)
    save(tmp_path, step, {"w": jnp.full(2, step)}, keep_latest=2, keep_steps=kept)
  assert checkpoint.steps(tmp_path) == (3, 4, 5)
