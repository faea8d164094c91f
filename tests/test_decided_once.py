"""Open settings are decided in one place: the uses of the deciding functions, read from the source.

A use is any mention of the function outside its definition, under whatever name it was imported; so
passing it on counts as well as calling it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
import functools
import pathlib

import import_graph
import pytest

ROOT = pathlib.Path(__file__).parents[1]
DECODER = "seerjax.models.decoder"
# The only modules of the library that use a function.
USERS: Mapping[str, set[str]] = {
  # What this machine can run.
  "seerjax.backends.choice.decided": {DECODER},
  "seerjax.backends.choice.backend_of": {DECODER},
  "seerjax.backends.kernel_support.reason_against": {"seerjax.backends.choice"},
  "seerjax.backends.native.availability.reason_against": {"seerjax.backends.choice"},
  # What this model leaves open.
  f"{DECODER}.numerics_for": {DECODER},
  "seerjax.models.config.largest_shards": {"seerjax.models.config", "seerjax.models.presets"},
  # What a run leaves open; all else reads it in a run's programs.
  "seerjax.run.config.for_model": {"seerjax.run.programs"},
  # The doors at which a model and numerics meet; everyone else is handed a `Decoder`.
  f"{DECODER}.decide": {
    "seerjax.commands.discover",
    "seerjax.commands.generate",
    "seerjax.commands.replay",
    "seerjax.models.flax_module",
    "seerjax.models.loading",
    "seerjax.run.config",
    "seerjax.run.placement",
    "seerjax.run.self_test",
    "seerjax.run.setup",
    "seerjax.speculation.draft_program",
    "seerjax.trainer.distill",
  },
}
# Names of implementations. Code outside these modules asks for a trait of a backend instead.
KINDS = {"auto", "tiled", "native", "pallas", "pallas_interpreted", "untiled"}
NAMERS = {
  "seerjax.backends.choice",
  "seerjax.numerics",
  # A draft has splits and tiles of its own on each backend.
  "seerjax.speculation.draft_program",
}


@functools.cache
def used_names(source: str, module: str) -> frozenset[str]:
  """Returns the dotted names that a module mentions, its own definitions included."""
  tree = ast.parse(source)
  own = {
    node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)
  }
  known = dict(own)
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      known |= {alias.asname: alias.name for alias in node.names if alias.asname}
      known |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = module.split(".")[: -node.level] if node.level else []
      path = ".".join([*base, *([node.module] if node.module else [])])
      known |= {alias.asname or alias.name: f"{path}.{alias.name}" for alias in node.names}
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
      first, _, rest = ast.unparse(node).partition(".")
      if first in known:
        found.add(f"{known[first]}.{rest}".rstrip("."))
  return frozenset(found)


def users(function: str, sources: Mapping[str, str]) -> set[str]:
  """Returns the modules that mention a function by its dotted name."""
  return {module for module, source in sources.items() if function in used_names(source, module)}


def compared_kinds(source: str) -> set[str]:
  """Returns the names of implementations with which a module compares something."""
  return {
    constant.value
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("backend")
    for constant in ast.walk(node)
    if isinstance(constant, ast.Constant) and constant.value in KINDS
  }


@functools.cache
def library() -> dict[str, str]:
  """Returns the source of every module of the library, by dotted name."""
  paths = import_graph.modules()
  return {
    name: (ROOT / path).read_text() for name, path in paths.items() if path.startswith("seerjax/")
  }


@pytest.mark.parametrize("function", USERS)
def test_what_decides_is_used_where_it_is_written_down(function):
  assert users(function, library()) == USERS[function]


def test_names_of_implementations_are_compared_where_one_is_chosen():
  assert {name for name, source in library().items() if compared_kinds(source)} == NAMERS


@pytest.mark.parametrize(
  "source",
  [
    "from seerjax.backends import choice\nchoice.backend_of(numerics)",
    "from seerjax.backends import choice as c\nmade = functools.partial(c.backend_of)",
    "from seerjax.backends.choice import backend_of as made\ndef f(x):\n  return made(x)",
    "import seerjax.backends.choice\nseerjax.backends.choice.backend_of(numerics)",
    "def f(x):\n  from ..backends import choice\n  return choice.backend_of(x)",
  ],
)
def test_another_user_is_seen_under_whatever_name(source):
  function, more = "seerjax.backends.choice.backend_of", {"seerjax.serve.another": source}
  assert users(function, library() | more) == USERS[function] | {"seerjax.serve.another"}
  # What merely has the name, or only imports it, is no use.
  for other in ("from seerjax.backends import choice", "def backend_of():\n  pass\nbackend_of()"):
    assert not users(function, {"seerjax.serve.another": other})


def test_a_comparison_with_an_implementation_is_seen():
  assert compared_kinds("if numerics.backend in ('native', x): pass") == {"native"}
  assert not compared_kinds("numerics(backend='native')\nx == 'native'")
