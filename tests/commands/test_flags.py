"""Dataclasses convert to flags and back; an invalid command fails with one line."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

from absl import flags
import ml_collections
from ml_collections import config_flags
import pytest

from seerjax import metrics
from seerjax.commands import flags as flags_lib
from seerjax.models import chat_template
from seerjax.run import command_line, presets as run_presets, stops
from seerjax.run.config import RunConfig
from seerjax.trainer import losses

ROOT = pathlib.Path(__file__).parents[2]


def parsed(config, *arguments):
  """The config after a command line."""
  values = flags.FlagValues()
  line = ["program", *arguments]
  config_values = flags_lib.to_flags(config)
  flags_lib.check_names(config, arguments)
  flags_lib.name_entries(config_values, config, arguments)
  config_flags.DEFINE_config_dict("config", config_values, flag_values=values, sys_argv=line)
  values(line)
  return flags_lib.from_flags(type(config), values.config)


@dataclasses.dataclass(frozen=True)
class Inner:
  sizes: tuple[int, ...] = (4, 8)
  cap: float | None = None
  rate: float = 0.5


@dataclasses.dataclass(frozen=True)
class Outer:
  count: int = 3
  name: str = "a"
  is_on: bool = False
  inner: Inner = Inner()

  def __post_init__(self):
    if self.count < 0:
      raise ValueError(f"Outer.count: got {self.count}, expected at least 0; raise it.")


def test_what_is_not_said_stays():
  assert parsed(Outer()) == Outer()
  assert parsed(run_presets.main_job()) == run_presets.main_job()
  assert hash(parsed(run_presets.main_job())) == hash(run_presets.main_job())


def test_nested_fields_are_overridden_by_dots():
  found = parsed(Outer(), "--config.inner.rate=1e-4", "--config.count=7", "--config.is_on=true")
  assert found == Outer(count=7, is_on=True, inner=Inner(rate=1e-4))


def test_an_int_is_welcome_where_a_float_is():
  assert parsed(Outer(), "--config.inner.rate=2").inner.rate == 2.0


def test_tuples_stay_tuples():
  assert parsed(Outer(), "--config.inner.sizes=(16, 32, 64)").inner.sizes == (16, 32, 64)
  job = parsed(run_presets.main_job(), "--config.engine.batch_size_buckets=(64,)")
  assert job.engine.batch_size_buckets == (64,)


def test_none_stays_none_or_takes_a_number():
  assert parsed(Outer(), "--config.inner.rate=2").inner.cap is None
  assert parsed(Outer(), "--config.inner.cap=2").inner.cap == 2.0


def test_entries_of_a_mapping_are_named_on_the_command_line():
  job = parsed(
    run_presets.main_job(),
    "--config.chat.system=Be brief.",
    "--config.chat.variables.enable_thinking=False",
    "--config.chat.variables.style=plain",
    "--config.chat.variables.depth=3",
  )
  assert job.chat.system == "Be brief."
  assert job.chat.variables == dict(enable_thinking=False, style="plain", depth=3)
  assert hash(job) != hash(run_presets.main_job())
  job = parsed(
    run_presets.main_job(),
    "--config.task_options.max_terms=3",
    "--config.task_options.operators=('+', '-')",
  )
  assert job.task_options == dict(max_terms=3, operators=("+", "-"))
  # As stored in config.json.
  stored = ml_collections.ConfigDict(dict(system="", variables=dict(enable_thinking=True)))
  found = flags_lib.from_flags(chat_template.ChatConfig, stored)
  assert found == chat_template.ChatConfig(variables=dict(enable_thinking=True))
  assert parsed(found, "--config.variables.enable_thinking=false").variables == dict(
    enable_thinking=False
  )


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--config.chat.variables=x", "got a whole mapping, expected one of its entries; write"),
    ("--config.chat.variables.a.b=3", r"variables.a.b: got 'a', expected one of \[\]"),
    ("--config.chat.variables.a=[1]", r"got '\[1\]', expected text, a number, True or False"),
    ("--config.chat.variables.messages=1", "ChatConfig.variables: got 'messages', expected the"),
  ],
)
def test_entries_that_no_flag_can_hold_are_refused(argument, message):
  with pytest.raises(ValueError, match=message):
    parsed(run_presets.main_job(), argument)


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_policy_is_set_by_its_fields_or_named():
  job = run_presets.main_job()
  assert parsed(job, "--config.scheduler.chunk_tokens=7").scheduler.chunk_tokens == 7
  assert parsed(job, "--config.scheduler=my_module:Mine").scheduler == "my_module:Mine"
  with pytest.raises(ValueError, match="RunConfig.scheduler: got 'Mine', expected 'my_module:My"):
    parsed(job, "--config.scheduler=Mine")
  with pytest.raises(ValueError, match="RunConfig.engine: got 'small', expected an EngineConfig"):
    parsed(job, "--config.engine=small")


def test_infinity_is_read_from_flags_and_from_json():
  job = parsed(run_presets.main_job(), "--config.loss.clip_high=inf")
  assert job.loss.clip_high == float("inf")
  stored = flags_lib.to_flags(losses.dapo()).to_dict() | {"clip_high": "Infinity"}
  found = flags_lib.from_flags(losses.LossConfig, ml_collections.ConfigDict(stored))
  assert found == dataclasses.replace(losses.dapo(), clip_high=float("inf"))


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    (
      "--config.cuont=4",
      r"--config.cuont: got 'cuont', expected one of .*; did you mean 'count'\?",
    ),
    ("-config.inner.raet", r"'raet', expected one of \['sizes', 'cap', 'rate'\]; did you mean 'r"),
    ("--config.inner.deep.rate=4", r"got 'deep', expected one of .*; correct the spelling."),
    ("--config.count.rate=4", r"--config.count.rate: got 'rate', expected one of \[\]; correct"),
  ],
)
def test_a_misspelt_field_is_refused(argument, message):
  with pytest.raises(ValueError, match=message):
    flags_lib.check_names(Outer(), ["--workdir=x", argument])
  with pytest.raises(ValueError, match=message):
    parsed(Outer(), argument)


def test_fields_that_are_there_are_welcome():
  line = ["--config.inner.rate=4", "--config.count", "4", "config.cuont", "--resume"]
  flags_lib.check_names(Outer(), line)


def test_a_value_of_another_type_is_refused():
  with pytest.raises(flags.IllegalFlagValueError, match="flag --config.count=many"):
    parsed(Outer(), "--config.count=many")


def test_the_dataclass_refuses_what_cannot_be():
  with pytest.raises(ValueError, match="Outer.count: got -1, expected at least 0"):
    parsed(Outer(), "--config.count=-1")


def test_a_name_from_elsewhere_is_refused():
  values = ml_collections.ConfigDict({"count": 1, "colour": 2})
  with pytest.raises(ValueError, match="Outer: got colour, expected fields of .'count', 'inner'"):
    flags_lib.from_flags(Outer, values)


def test_a_stored_configuration_is_read_again(tmp_path):
  job = dataclasses.replace(run_presets.main_job(), loss=losses.LossConfig(clip_high=float("inf")))
  path = tmp_path / "config.json"
  entries = dataclasses.asdict(job) | {"fingerprint": {"digest": "1"}}
  metrics.write_summary(path, metrics.encode(entries))
  assert flags_lib.read(RunConfig, path) == job
  assert parsed(flags_lib.read(RunConfig, path), "--config.seed=3").seed == 3


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (None, "--config_file: got .*, which is no file, expected the config.json of a run; correct"),
    ("{", "--config_file: got .*, which is not JSON .*, expected the config.json of a run"),
    ("[]", "--config_file: got .* without a field of Outer, expected the config.json of a run"),
    ('{"colour": 1}', "--config_file: got .* without a field of Outer, expected the config.json"),
    ('{"count": -1}', "Outer.count: got -1, expected at least 0"),
  ],
)
def test_a_file_that_holds_no_configuration_is_refused(tmp_path, text, message):
  path = tmp_path / "config.json"
  if text is not None:
    path.write_text(text)
  with pytest.raises(ValueError, match=message):
    flags_lib.read(Outer, path)


def test_adapters_are_a_flag():
  assert parsed(run_presets.main_job(), "--config.lora_rank=8").lora_rank == 8
  assert isinstance(parsed(run_presets.main_job()), RunConfig)


def test_words_that_belong_to_no_flag_are_refused():
  command_line.check_arguments(["seerjax train"])
  with pytest.raises(
    ValueError, match=r"seerjax train: got \['seed', '3'\], expected flags alone; write"
  ):
    command_line.check_arguments(["seerjax train", "seed", "3"])


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError, ImportError, NotImplementedError])
def test_a_refusal_is_its_message_alone(kind, capsys):
  with pytest.raises(SystemExit) as stopped, command_line.refusals():
    raise kind("--part: got e, expected a; correct it.")
  assert stopped.value.code == 2
  assert capsys.readouterr().err == "--part: got e, expected a; correct it.\n"


def test_ctrl_c_ends_with_one_line(capsys):
  with pytest.raises(SystemExit) as stopped, command_line.refusals():
    raise KeyboardInterrupt
  assert stopped.value.code == 130
  assert capsys.readouterr().err == "stopped by Ctrl-C before the end\n"


def test_sigterm_ends_with_one_line_and_its_status(capsys):
  with pytest.raises(SystemExit) as stopped, command_line.refusals():
    os.kill(os.getpid(), signal.SIGTERM)
  assert stopped.value.code == 143
  assert capsys.readouterr().err == "stopped by SIGTERM before the end\n"


def test_a_run_that_was_stopped_says_after_which_step(capsys):
  with pytest.raises(SystemExit) as stopped, command_line.refusals():
    raise stops.Interrupted("stopped by SIGTERM after step 2 of 4; --resume continues", 143)
  assert stopped.value.code == 143
  assert capsys.readouterr().out == "stopped by SIGTERM after step 2 of 4; --resume continues\n"


def test_a_mistake_of_ours_keeps_its_traceback():
  with pytest.raises(AssertionError, match="ours"), command_line.refusals():
    raise AssertionError("ours")


# (command or experiment, its arguments, how stderr begins): nothing is computed before these. A
# process each, which takes seconds to import JAX: one a command, and the rest in the long run.
REFUSED = [
  ("train", ["--config.rollout.top_p=0"], "SamplingParams.top_p: got 0.0, expected 0 < top_p <= 1"),
  (
    "experiments.invariance.nano",
    ["--part=e"],
    "--part: got e, expected some of a, b, c, d; --part=a,d runs two.",
  ),
  (
    "experiments.throughput.engine",
    ["--model=/nowhere"],
    "resolve: got '/nowhere', which is not a directory",
  ),
  ("generate", ["--prompt=1+1", "--top_p=0"], "SamplingParams.top_p: got 0.0, expected 0 < top_p"),
  ("export", ["--run=/nowhere", "--out=there"], "--run: got /nowhere, which has no config.json"),
  (
    "experiments.learning.pretrain_nano",
    ["--num_tokens=9"],
    "PretrainConfig: got num_tokens=9, tokens_per_batch=3072",
  ),
  *(
    pytest.param(*case, marks=pytest.mark.long)
    for case in (
      (
        "train",
        ["seed=3"],
        "seerjax train: got ['seed=3'], expected flags alone; write --name=value.",
      ),
      ("export", [], "--out: got no path, expected a directory or GGUF file to make; name one."),
      ("export", ["--out=x", "--model=nano", "--gguf_pre=qwen2"], "--gguf_pre: got it with no"),
      ("export", ["--out=x", "--model=nano", "--step=3"], "--step: got it with --model, where it"),
      ("export", ["--out=x", "--adapter", "--gguf=F32"], "--adapter: got it with --gguf, where it"),
      (
        "experiments.invariance.nano",
        ["--part=c", "--model=/nowhere"],
        "resolve: got '/nowhere', which is not a",
      ),
      (
        "experiments.learning.pretrain_nano",
        ["--start=/nowhere"],
        "/nowhere/config.json: got no such file, expected a",
      ),
    )
  ),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_a_command_that_cannot_run_says_so_in_one_line(name, arguments, message, tmp_path):
  workdir = [] if name in ("export", "generate") else [f"--workdir={tmp_path / 'run'}"]
  module = [name] if "." in name else ["seerjax.commands", name]
  done = subprocess.run(
    [sys.executable, "-m", *module, *arguments, *workdir],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    check=False,
  )
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith(message) and done.stderr.count("\n") == 1, done.stderr
  assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True)
class Left:
  size: int = 1


@dataclasses.dataclass(frozen=True)
class Right:
  weight: float = 2.0


@dataclasses.dataclass(frozen=True)
class Either:
  side: Left | Right = Right()


def test_a_field_of_two_kinds_keeps_the_kind_that_it_has():
  for value in (Either(), Either(Left(3))):
    assert flags_lib.from_flags(Either, flags_lib.to_flags(value)) == value


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    ([], "nano"),
    (["--config.model=a/b"], "a/b"),
    (["-config.model=a"], "a"),
    (["--config.model", "a"], "a"),
    (["--config.model=a", "--config.model=b"], "b"),
    (["--config.tensor_parallel_size=2", "--workdir=config.model=c"], "nano"),
    (["config.model=a"], "nano"),
    (["--config.model"], "nano"),
    (["--config.model=x=y"], "x=y"),
  ],
)
def test_what_a_command_line_gives_a_flag_is_read_before_flags_are_defined(arguments, expected):
  assert flags_lib.given(arguments, "config.model", "nano") == expected
