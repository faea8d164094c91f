"""The public API in the source equals the committed list.

After an intended change `python tests/test_public_api.py` rewrites tests/public_api.txt; the
difference then shows in review.
"""

from __future__ import annotations

import ast
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
COMMITTED = ROOT / "tests" / "public_api.txt"
# Public names outside `seerjax.__all__`; a change to them is also an interface change.
SETTLED = (
  "engine.chunks",
  "engine.runner",
  "engine.sequence",
  "kv.holding",
  "models.chat_template",
  "models.config",
  "models.decoder",
  "models.gguf_write",
  "models.head",
  "models.huggingface",
  "models.kv_layout",
  "models.loading",
  "models.parameters",
  "models.tokenizer",
  "models.transformer",
  "rollout.groups",
  "rollout.journal",
  "rollout.journal_records",
  "run.policy",
  "trainer.optimizer",
  "trainer.packing",
  "trainer.step",
)


def front_door() -> tuple[list[str], dict[str, str], str]:
  """Returns `__all__`, the home module of each record, and the version, read from the source."""
  values = {}
  for node in ast.parse((ROOT / "seerjax" / "__init__.py").read_text()).body:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
      values[node.targets[0].id] = ast.literal_eval(node.value)
  return values["__all__"], values["_HOMES"], values["__version__"]


def is_public(name: str) -> bool:
  return not name.startswith("_")


def target_name(node: ast.stmt) -> str:
  """Returns the name that a plain or annotated assignment binds, "" for other statements."""
  if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
    return node.targets[0].id
  if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
    return node.target.id
  return ""


def describe(node: ast.stmt, prefix: str) -> list[str]:
  """Returns one line for each public signature that a statement declares, unparsed from the source.

  Defaults stay: they are promises as well. Bodies, docstrings and private names do not.
  """
  if isinstance(node, ast.FunctionDef):
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    decorators = [
      f"@{ast.unparse(d)} " for d in node.decorator_list if isinstance(d, ast.Name | ast.Attribute)
    ]
    return [f"{prefix}{''.join(decorators)}def {node.name}({ast.unparse(node.args)}){returns}"]
  if isinstance(node, ast.ClassDef):
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    lines = [f"{prefix}class {node.name}{bases}"]
    for member in node.body:
      if isinstance(member, ast.FunctionDef):
        if is_public(member.name) or member.name == "__init__":
          lines += describe(member, f"{prefix}  ")
      elif is_public(target_name(member)) and target_name(member):
        lines.append(f"{prefix}  {ast.unparse(member)}")
    return lines
  name = target_name(node)
  if not name or not is_public(name):
    return []
  assert isinstance(node, ast.Assign | ast.AnnAssign)
  # A long table is data, not a signature.
  return [f"{prefix}{ast.unparse(node) if len(ast.unparse(node)) <= 100 else name + ' = ...'}"]


def describe_module(path: pathlib.Path) -> list[str]:
  """Returns the public signatures of a module, or of all modules of a room, in their order."""
  if path.is_dir():
    children = sorted(p for p in path.glob("*.py") if is_public(p.stem))
    return [line for p in children for line in (f"  [{p.stem}]", *describe_module(p))]
  return [
    line
    for node in ast.parse(path.read_text()).body
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or is_public(node.name)
    for line in describe(node, "  ")
  ]


def public_api() -> str:
  """Returns the whole public API as text, one signature a line."""
  names, homes, _ = front_door()
  lines = []
  for name in names:
    if name in homes:
      body = ast.parse((ROOT / "seerjax" / f"{homes[name].replace('.', '/')}.py").read_text()).body
      node = next(
        n
        for n in body
        if target_name(n) == name
        or (isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
      )
      lines += [f"seerjax.{name}, from seerjax.{homes[name]}", *describe(node, "  "), ""]
    else:
      room = ROOT / "seerjax" / name
      path = room if room.is_dir() else room.with_suffix(".py")
      lines += [f"seerjax.{name}", *describe_module(path), ""]
  for name in SETTLED:
    path = ROOT / "seerjax" / f"{name.replace('.', '/')}.py"
    lines += [f"seerjax.{name}", *describe_module(path), ""]
  return "\n".join(lines).rstrip() + "\n"


def test_the_public_api_is_the_committed_one():
  got, expected = public_api().splitlines(), COMMITTED.read_text().splitlines()
  new, gone = [x for x in got if x not in expected], [x for x in expected if x not in got]
  assert got == expected, (
    f"public API: got new lines {new} without {gone}, expected those of tests/public_api.txt;"
    " if the change is meant, run `python tests/test_public_api.py` and commit the file."
  )


def test_every_public_name_is_there():
  import seerjax  # Here, so that this file runs as a program where nothing is installed.

  names, homes, _ = front_door()
  assert names == sorted(set(names))
  assert set(homes) <= set(names)
  for name in names:
    assert getattr(seerjax, name) is not None
  assert set(names) <= set(dir(seerjax))


def test_an_unknown_name_is_refused():
  import pytest

  import seerjax

  with pytest.raises(AttributeError, match="got the attribute 'Sheduler', expected one of"):
    seerjax.Sheduler  # noqa: B018 - reading it is the test


def test_a_changed_signature_is_seen():
  before = ast.parse("def f(x: int, *, y: float = 0.1) -> int:\n  return 1").body[0]
  after = ast.parse("def f(x: int, *, y: float = 0.2) -> int:\n  return 1").body[0]
  assert describe(before, "") == ["def f(x: int, *, y: float=0.1) -> int"]
  assert describe(before, "") != describe(after, "")


def test_the_package_is_described_once():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert "version" in project["dynamic"]
  assert f"version: {front_door()[2]}\n" in (ROOT / "CITATION.cff").read_text()
  assert front_door()[2] in (ROOT / "CHANGELOG.md").read_text()


if __name__ == "__main__":
  COMMITTED.write_text(public_api())
  print(f"{COMMITTED}: written")
