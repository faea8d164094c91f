"""Converts frozen dataclasses to flags (`--config.optimizer.learning_rate=1e-4`) and back.

Every command and every experiment uses this module, and it writes the help of the commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import difflib
import inspect
import json
import pathlib
import re
import sys
import textwrap
import typing
from typing import Any, NoReturn, Protocol, TypeVar, cast, runtime_checkable

from absl import app, flags
import ml_collections
from ml_collections import config_dict, config_flags

from seerjax import parallel
from seerjax.run import command_line

T = TypeVar("T")

WIDTH = 100  # Columns of a help text.
INDENT = 6  # Columns before a clause that has no room behind its flag.
COLUMN = 46  # Where clauses begin.

flags.disclaim_key_flags()  # Flags defined here belong to their caller and appear in its --help.


@runtime_checkable
class Command(Protocol):
  """A module that implements a command: its flags and `main`; the docstring heads the help."""

  __doc__: str | None

  def define_flags(self) -> object:
    """Defines the command's flags; returns the default of `--config`, None without one."""
    ...

  def main(self, argv: list[str], /) -> None:
    """Runs the command; flags are parsed, and `argv` holds the remaining arguments."""
    ...


def run(command: Command, *, show_help: bool) -> NoReturn:
  """Defines the flags of a command, and runs it or prints its help."""
  before = set(flags.FLAGS)
  default = command.define_flags()
  if show_help:
    own = {name: flags.FLAGS[name] for name in flags.FLAGS if name not in before}
    print(help_of(command.__doc__ or "", own, default))
    sys.exit(0)
  command_line.keep_programs()
  app.run(command.main)


def help_of(head: str, own: Mapping[str, flags.Flag], default: object) -> str:
  """Returns the help of a command.

  Args:
    head: description of the command.
    own: flags of the command, by name.
    default: default of `--config`, a dataclass; None without one.
  """
  lines = [head.rstrip(), "", "flags:"]
  for name, flag in own.items():
    if name == "config":
      continue
    parser = flag.parser
    is_enum = isinstance(parser, flags.EnumParser)
    kind = "|".join(parser.enum_values) if is_enum else flag.flag_type()
    text = (flag.help or "").removeprefix(f"<{kind}>: ")  # absl writes the choices, too.
    if flag.boolean:
      lines += described(f"--[no]{name}", flag.default, "bool", text)
    else:
      lines += described(f"--{name}", flag.default, kind, text)
  if default is not None:
    lines += ["", "configuration:", *described_fields(default, "config")]
  return "\n".join(lines)


def described_fields(config: Any, prefix: str) -> list[str]:
  """Returns lines on each field of a (nested) dataclass: name, default, type and its clause."""
  texts = clauses(type(config))
  lines = []
  for field in dataclasses.fields(config):
    value, name = vars(config)[field.name], f"{prefix}.{field.name}"
    if dataclasses.is_dataclass(value):
      lines += described_fields(value, name)
    elif isinstance(value, Mapping):
      lines += described(f"--{name}.NAME", dict(value), "mapping", texts.get(field.name, ""))
    else:
      kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
      lines += described(f"--{name}", value, kind, texts.get(field.name, ""))
  return lines


def described(name: str, default: object, kind: str, text: str) -> list[str]:
  """Returns the lines of one flag: `--name=default (kind)`, and a clause behind it or beneath."""
  shown = "" if default in (None, "", {}, []) else f"={default}"
  head = f"  {name}{shown} ({kind})"
  if len(head) < COLUMN:
    return textwrap.wrap(
      text, WIDTH, initial_indent=head.ljust(COLUMN), subsequent_indent=" " * COLUMN
    ) or [head]
  indent = " " * INDENT
  return [head, *textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)]


def clauses(kind: type) -> dict[str, str]:
  """Returns the first clause on each field of a dataclass, from its docstring's "Attributes:".

  Fields that it inherits have the clauses of its bases.
  """
  found: dict[str, str] = {}
  for base in reversed(kind.__mro__):
    found |= _attributes(base.__doc__ or "")
  return {name: re.split(r"[;.:] |[.;]$", text)[0] for name, text in found.items()}


def _attributes(docstring: str) -> dict[str, str]:
  """Returns the text on each attribute by its name."""
  found: dict[str, str] = {}
  names: list[str] = []
  for line in inspect.cleandoc(docstring).partition("Attributes:\n")[2].splitlines():
    entry = re.match(r"  ([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)", line)
    if entry:
      names = entry[1].split(", ")
      found |= dict.fromkeys(names, entry[2])
    elif line.startswith("    "):
      found |= {name: f"{found[name]} {line.strip()}" for name in names}
    elif line:
      break
  return found


def to_flags(config: Any) -> ml_collections.ConfigDict:
  """Returns a locked ConfigDict with the fields of a (nested) dataclass; it rejects other names.

  A mapping field has the entries of its value; `name_entries` adds those of a command line.
  """
  values = {
    field.name: to_flags(value) if dataclasses.is_dataclass(value) else _flag_value(value)
    for field in dataclasses.fields(config)
    for value in (vars(config)[field.name],)
  }
  return ml_collections.ConfigDict(values).lock()


def check_names(config: Any, arguments: Sequence[str]) -> None:
  """Rejects `--config.field` on a command line if there is no such field.

  Raises:
    ValueError: listing the existing fields.
  """
  for argument in arguments:
    name = argument.lstrip("-").partition("=")[0]
    if not argument.startswith("-") or not name.startswith("config."):
      continue
    at, parts = config, name.split(".")[1:]
    for part in parts:
      if isinstance(at, Mapping) and part is parts[-1]:
        break  # A mapping accepts any name.
      names = (
        [field.name for field in dataclasses.fields(at)] if dataclasses.is_dataclass(at) else []
      )
      if part not in names:
        near = difflib.get_close_matches(part, names, n=1)
        fix = f"did you mean {near[0]!r}?" if near else "correct the spelling."
        raise ValueError(f"--{name}: got {part!r}, expected one of {names}; {fix}")
      at = vars(at)[part]
    else:
      if isinstance(at, Mapping):
        raise ValueError(
          f"--{name}: got a whole mapping, expected one of its entries; write --{name}.NAME=VALUE."
        )


def name_entries(values: ml_collections.ConfigDict, config: Any, arguments: Sequence[str]) -> None:
  """Adds flags for the entries of mapping fields that a command line sets.

  A record that the command line sets to a string becomes a string flag: "my_module:my_record".

  Raises:
    ValueError: for a value that is not a string, number, bool, or a tuple of these.
  """
  for argument in arguments:
    name, _, text = argument.lstrip("-").partition("=")
    parts = name.split(".")
    if not argument.startswith("-") or parts[0] != "config":
      continue
    at: Any = config
    inner: Any = values
    for part in parts[1:-1]:
      at, inner = vars(at)[part], inner[part]
    if not isinstance(at, Mapping):
      if text and dataclasses.is_dataclass(vars(at).get(parts[-1])):
        with inner.unlocked(), inner.ignore_type():
          inner[parts[-1]] = text
      continue
    value = command_line.literal(text)
    several = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(one, (str, bool, int, float)) for one in several):
      raise ValueError(
        f"--{name}: got {text!r}, expected text, a number, True or False, or a tuple of these;"
        f" write --{name}=False."
      )
    with inner.unlocked():
      inner[parts[-1]] = value


def given(arguments: Sequence[str], name: str, default: str) -> str:
  """Returns the value of a flag on a command line (the last one), or the default."""
  found = default
  for place, argument in enumerate(arguments):
    flag, has_value, value = argument.partition("=")
    if argument.startswith("-") and flag.lstrip("-") == name:
      found = value if has_value else next(iter(arguments[place + 1 :]), default)
  return found


def define_presets(presets: Mapping[str, T], workdir: str) -> T:
  """Defines `--preset`, which selects the defaults of `--config`, and `define_flags`' flags.

  The first preset is the default. Exits if the command line names an unknown field.

  Returns:
    The preset.
  """
  names = list(presets)
  flags.DEFINE_enum("preset", names[0], names, "Preset that --config starts from.")
  with command_line.refusals():
    try:
      flags.FLAGS(sys.argv, known_only=True)  # Other flags are not defined yet.
    except flags.IllegalFlagValueError as error:
      raise ValueError(f"--preset: {error}; choose one of {names}.") from None
  return define_flags(presets[flags.FLAGS.preset], workdir)


def define_flags(default: T, workdir: str) -> T:
  """Defines `--config`, with the values of a dataclass, and `--workdir`; returns the dataclass.

  Exits if the command line names an unknown field.
  """
  define_config(default)
  flags.DEFINE_string("workdir", workdir, "Output directory of the run.")
  flags.register_validator("workdir", bool, "got an empty path, expected a directory; name one")
  return default


def define_config(default: Any) -> None:
  """Defines `--config`, with the values of a dataclass.

  Exits if the command line names an unknown field.
  """
  with command_line.refusals():
    check_names(default, sys.argv[1:])
    values = to_flags(default)
    name_entries(values, default, sys.argv[1:])
  config_flags.DEFINE_config_dict("config", values)


def define_slice_flags() -> None:
  """Defines the flags of a multi-process slice; see `slice_of_flags`."""
  usual = parallel.SliceConfig()
  flags.DEFINE_integer(
    "num_processes",
    usual.num_processes,
    "Number of processes that form one mesh; all run this command.",
  )
  flags.DEFINE_integer("process_id", usual.process_id, "Index of this process, from 0.")
  flags.DEFINE_string("coordinator", usual.coordinator, "HOST:PORT on which process 0 listens.")
  flags.DEFINE_enum(
    "launcher", usual.launcher, parallel.LAUNCHERS,
    "Launcher that sets both of these: slurm, ompi, k8s, gcetpu or gketpu.",
  )  # fmt: skip


def slice_of_flags() -> parallel.SliceConfig:
  """Returns the configuration from the flags of `define_slice_flags`.

  Raises:
    ValueError: if the flags are inconsistent.
  """
  args = flags.FLAGS
  return parallel.SliceConfig(
    num_processes=args.num_processes,
    process_id=args.process_id,
    coordinator=args.coordinator,
    launcher=args.launcher,
  )


def from_flags(kind: type[T], values: ml_collections.ConfigDict) -> T:
  """Returns the dataclass with the values of the flags, validated by its own checks.

  Infinity may also be written as "Infinity", so that a run's config.json can be read.

  Raises:
    ValueError: for a name that the dataclass does not have.
  """
  hints = typing.get_type_hints(kind)
  unknown = sorted(set(values) - set(hints))
  if unknown:
    raise ValueError(
      f"{kind.__name__}: got {', '.join(unknown)}, expected fields of {sorted(hints)}; correct the"
      " spelling."
    )
  arguments: dict[str, Any] = {}
  defaults = {field.name: field.default for field in dataclasses.fields(cast(Any, kind))}
  for name, value in values.items():
    hint, default = hints[name], defaults[name]
    if isinstance(value, ml_collections.ConfigDict) and typing.get_origin(hint) is Mapping:
      arguments[name] = value.to_dict()
      continue
    if isinstance(value, ml_collections.ConfigDict):
      arguments[name] = from_flags(_kind_of(hint, value, default), value)
      continue
    if hint in (float, float | None) and isinstance(value, str):
      value = float(value)
    arguments[name] = value
  return kind(**arguments)


def read(kind: type[T], path: pathlib.Path) -> T:
  """Returns a dataclass from a JSON file with its fields, such as a run's config.json.

  Other entries of the file are left out.

  Raises:
    ValueError: if there is no such file, or it holds no such fields.
  """
  if not path.is_file():
    raise ValueError(
      f"--config_file: got {path}, which is no file, expected the config.json of a run; correct it."
    )
  try:
    stored = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(
      f"--config_file: got {path}, which is not JSON ({error}), expected the config.json of a run;"
      " correct it."
    ) from error
  hints = typing.get_type_hints(kind)
  names = [name for name in hints if name in stored] if isinstance(stored, dict) else []
  if not names:
    raise ValueError(
      f"--config_file: got {path} without a field of {kind.__name__}, expected the config.json of a"
      " run; correct it."
    )
  return from_flags(kind, ml_collections.ConfigDict({name: frozen(stored[name]) for name in names}))


def frozen(value: Any) -> Any:
  """Returns a JSON value with lists converted to tuples, as in the dataclasses."""
  if isinstance(value, dict):
    return {name: frozen(part) for name, part in value.items()}
  return tuple(map(frozen, value)) if isinstance(value, list) else value


def _kind_of(hint: Any, values: ml_collections.ConfigDict, default: Any) -> Any:
  """Returns the dataclass type of a nested field: that of the hint or default with these fields."""
  kinds = [
    kind
    for kind in (*(typing.get_args(hint) or (hint,)), type(default))
    if dataclasses.is_dataclass(kind)
  ]
  names = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
  return next((kind for kind, own in zip(kinds, names) if own == set(values)), kinds[-1])


def _flag_value(value: Any) -> Any:
  if isinstance(value, Mapping):
    return ml_collections.ConfigDict(dict(value))
  # A field with the value None accepts a number on the command line.
  return config_dict.placeholder(float) if value is None else value
