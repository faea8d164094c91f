"""The console script: its help fits a screen and needs no JAX; a command's lists every field."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import sys

from absl import flags
import pytest

from seerjax.commands import __main__ as main, check, flags as flags_lib, problems
from seerjax.discovery.config import DiscoverConfig
from seerjax.run import presets as run_presets
from seerjax.run.evaluating import EvaluateConfig

ROOT = pathlib.Path(__file__).parents[2]
LINES, COLUMNS = 24, 100
# Modules of the folder that are no commands.
OTHERS = {"__init__", "__main__", "flags", "problems"}


def test_the_help_fits_a_screen_and_has_a_clause_for_each_command(capsys):
  main.main(["--help"])
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
  assert {line.split()[0] for line in lines if line.startswith("  ")} == set(main.COMMANDS)
  main.main([])
  assert capsys.readouterr().out.splitlines() == lines


def test_the_help_needs_no_jax():
  program = (
    "import sys\nfrom seerjax.commands import __main__ as main\nmain.main(['--help'])\n"
    "print(sorted(sys.modules.keys() & {'jax', 'numpy', 'absl'}))"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert done.stdout.splitlines()[-1] == "[]"


def test_every_module_is_a_command_with_a_summary_and_a_usage():
  names = {path.stem for path in (ROOT / "seerjax" / "commands").glob("*.py")} - OTHERS
  assert names == set(main.COMMANDS)
  for name in names:
    command = main.module_of(name)
    assert command.__doc__ is not None and f"    seerjax {name}" in command.__doc__
    assert callable(command.define_flags) and callable(command.main)


@pytest.mark.parametrize(
  ("name", "fix"),
  [("trian", "did you mean 'train'?"), ("xyz", "seerjax --help says what each does.")],
)
def test_a_command_that_does_not_exist_is_refused_with_the_nearest_name(name, fix, capsys):
  with pytest.raises(SystemExit) as stopped:
    main.main([name])
  assert stopped.value.code == 2
  assert capsys.readouterr().err == (
    f"seerjax: got {name!r}, expected one of {', '.join(main.COMMANDS)}; {fix}\n"
  )


def fields_of(config) -> list[str]:
  """The dotted names of a configuration's fields."""
  names = []
  for field in dataclasses.fields(config):
    value = vars(config)[field.name]
    inner = fields_of(value) if dataclasses.is_dataclass(value) else [""]
    names += [f"{field.name}.{one}".rstrip(".") for one in inner]
  return names


@pytest.mark.parametrize(
  "config",
  [run_presets.main_job(), DiscoverConfig(), EvaluateConfig(), check.CheckConfig()],
  ids=lambda config: type(config).__name__,
)
def test_the_help_lists_every_field_with_its_type_its_default_and_a_clause(config):
  lines = flags_lib.described_fields(config, "config")
  assert max(map(len, lines)) <= COLUMNS
  text = "\n".join(lines)
  starts = list(re.finditer(r"^  --config\.([a-z0-9_.]+)(\.NAME)?(=.*?)? \(", text, re.M))
  assert [start[1] for start in starts] == fields_of(config)
  ends = [*(start.start() for start in starts[1:]), len(text)]
  for start, end in zip(starts, ends, strict=True):
    clause = text[start.end() : end].partition(")")[2]
    assert re.search(r"[A-Za-z]{2}", clause), f"{start[1]}: no clause"


@dataclasses.dataclass(frozen=True)
class Small:
  """A record.

  Attributes:
    size: how large it is; 0 means
      any.
    left, right: a place of
      the margin. More on it.

  More text.
  """

  size: int = 3
  left: float | None = None
  right: str = "x"


def test_a_clause_is_the_first_of_a_fields_text():
  margin = "a place of the margin"
  assert flags_lib.clauses(Small) == dict(size="how large it is", left=margin, right=margin)
  assert [" ".join(line.split()) for line in flags_lib.described_fields(Small(), "config")] == [
    "--config.size=3 (int) how large it is",
    f"--config.left (float | None) {margin}",
    f"--config.right=x (str) {margin}",
  ]


def test_the_help_of_a_command_has_its_own_flags():
  own = flags.FlagValues()
  flags.DEFINE_bool("fast", False, "Whether to hurry.", flag_values=own)
  flags.DEFINE_enum("kind", "a", ["a", "b"], "Which one.", flag_values=own)
  flags.DEFINE_string("long_name_" + "x" * 40, "", "What it is.", flag_values=own)
  names = {name: own[name] for name in own}
  text = flags_lib.help_of("Does a thing.\n", names, Small())
  assert text.startswith("Does a thing.\n\nflags:\n")
  flat = re.sub(r" +", " ", text)
  assert " --[no]fast=False (bool) Whether to hurry." in flat
  assert " --kind=a (a|b) Which one." in flat
  assert f"x (string)\n{' ' * flags_lib.INDENT}What it is." in text
  assert "\nconfiguration:\n  --config.size=3 (int)" in text


def test_a_loader_of_problems_that_is_not_there_is_refused():
  with pytest.raises(ValueError, match=r"--problems: got 'nowhere:load', but module 'nowhere'"):
    problems.factory_of("nowhere:load", "x")
  with pytest.raises(ValueError, match=r"problem: got 'circle_packing:26', expected 'my_module:My"):
    problems.factory_of("seerjax.commands.problems:load", "circle_packing:26")()
