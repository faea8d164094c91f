"""The import graph of the repository, read from the source, and the tests that a change concerns.

  python tests/support/import_graph.py FILE...    prints pytest's arguments for them, one a line
  python tests/support/import_graph.py --rooms FILE...    prints the argument that names the tests
                                                          of their rooms, for thorough tests

Imports inside functions and imports for type checkers count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("seerjax", "pallas_kernels", "experiments")
# Modules that every test uses.
EVERYWHERE = ("pyproject.toml", "tests/conftest.py", "tests/support/annotation_checker.py")


def room_of(module: str) -> str:
  """Returns the room of a dotted name: "seerjax.ops.tiles" lies in "ops"."""
  parts = module.split(".")
  return parts[1] if parts[0] == "seerjax" and len(parts) > 1 else parts[0]


def imports(tree: ast.AST, module: str) -> set[str]:
  """Returns every dotted name that a module imports; relative names are made absolute."""
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = module.split(".")[: -node.level] if node.level else []
      source = ".".join([*base, *([node.module] if node.module else [])])
      found |= {f"{source}.{alias.name}" for alias in node.names}
  return found


def dotted(path: str) -> str:
  """Returns the dotted name of a module: "seerjax/ops/__init__.py" is "seerjax.ops"."""
  return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def modules(root: pathlib.Path = ROOT) -> dict[str, str]:
  """Returns module paths by dotted name; modules of tests/support have their short name."""
  found = {}
  for package in PACKAGES:
    for path in sorted((root / package).rglob("*.py")):
      relative = path.relative_to(root).as_posix()
      found[dotted(relative)] = relative
  for path in sorted((root / "tests/support").glob("*.py")):
    found[path.stem] = path.relative_to(root).as_posix()
  return found


def imported_modules(names: Iterable[str], known: dict[str, str]) -> set[str]:
  """Returns the known modules that contain the imported names; parent packages do not count."""
  found = set()
  for name in names:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
      if (prefix := ".".join(parts[:end])) in known:
        found.add(prefix)
        break
  return found


def graph(root: pathlib.Path = ROOT) -> dict[str, set[str]]:
  """Returns the repository modules that each module imports, by dotted name."""
  known = modules(root)
  return {
    name: imported_modules(imports(ast.parse((root / path).read_text()), name), known) - {name}
    for name, path in known.items()
  }


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
  """Returns the sets of modules that import one another, directly or not; should be []."""
  reachable = {name: above([name], edges) for name in edges}
  found = {
    tuple(sorted(other for other in reachable[name] if name in reachable[other])) for name in edges
  }
  return sorted(list(circle) for circle in found if len(circle) > 1)


def above(changed: Iterable[str], edges: dict[str, set[str]]) -> set[str]:
  """Returns the given modules and all modules that import them, directly or not."""
  importers: dict[str, set[str]] = {}
  for name, imported in edges.items():
    for other in imported:
      importers.setdefault(other, set()).add(name)
  found, waiting = set(changed), list(changed)
  while waiting:
    new = importers.get(waiting.pop(), set()) - found
    found |= new
    waiting += new
  return found


def is_shared(path: str, changed: set[str]) -> bool:
  """Returns whether a path is a support file that tests share."""
  return path in changed and path.startswith("tests/support/")


def own_tests(changed: Iterable[str], root: pathlib.Path = ROOT) -> list[str]:
  """Returns the tests to run whole: changed test files, and files named after changed files.

  "seerjax/run/lifecycle.py" has tests/run/test_lifecycle.py; a file of a subfolder also has the
  test file of that subfolder; launch/ and .ci/ have all of tests/launch.
  """
  found = set()
  for path in map(pathlib.PurePosixPath, changed):
    top, *inner = path.parts
    if top == "tests" and path.name.startswith("test_"):
      found.add(path.as_posix())
    elif top in ("launch", ".ci"):
      found |= {f"tests/launch/{one.name}" for one in (root / "tests/launch").glob("test_*.py")}
    elif top in PACKAGES:
      mirror = pathlib.PurePosixPath("tests", *(inner if top == "seerjax" else path.parts))
      found |= {
        (mirror.parent / f"test_{mirror.stem}.py").as_posix(),
        (mirror.parent.parent / f"test_{mirror.parent.name}.py").as_posix(),
      }
  return sorted(one for one in found if (root / one).exists())


def concerned(changed: Iterable[str], root: pathlib.Path = ROOT) -> list[str]:
  """Returns the tests that changed files concern, as files and folders; always the contract.

  Concerned are the tests of the changed rooms and of the rooms that import them, `own_tests`, tests
  outside rooms that import such a module, and tests that import changed files of tests/support.
  A folder counts whole if its conftest.py changed or imports such a file. [`tests`] is all.

  Args:
    changed: paths relative to the root of the repository; prose concerns no test.
    root: the root of the repository.
  """
  changed = set(changed)
  if changed & {*EVERYWHERE}:
    return ["tests"]
  known, edges = modules(root), graph(root)
  affected = above([name for name, path in known.items() if path in changed], edges)
  found = {"tests/contract", "tests/test_dependencies.py", "tests/test_public_api.py"}
  found |= {*own_tests(changed, root)}
  rooms = {room_of(name) for name in affected if known[name].split("/")[0] in PACKAGES}
  for room in rooms:
    found |= {f"tests/{room}", f"tests/test_{room}.py"}
  shared = above([name for name in affected if is_shared(known[name], changed)], edges)
  for path in sorted((root / "tests").rglob("*.py")):
    relative = path.relative_to(root)
    is_conftest = path.name == "conftest.py"
    if not (is_conftest or path.name.startswith("test_")):
      continue
    names = imports(ast.parse(path.read_text()), dotted(relative.as_posix()))
    wanted = affected if path.parent == root / "tests" else shared
    if imported_modules(names, known) & wanted or (is_conftest and relative.as_posix() in changed):
      found.add((relative.parent if is_conftest else relative).as_posix())
  there = sorted(path for path in found if (root / path).exists())
  return [path for path in there if not {*map(str, pathlib.PurePosixPath(path).parents)} & {*there}]


def of_rooms(changed: Iterable[str], root: pathlib.Path = ROOT) -> list[str]:
  """Returns `own_tests` of changed files and the tests of their rooms, as files and folders."""
  changed = {*changed}
  known = {path: name for name, path in modules(root).items()}
  rooms = {room_of(known[path]) for path in changed if path in known and path[:6] != "tests/"}
  found = {f"tests/{room}" for room in rooms} | {f"tests/test_{room}.py" for room in rooms}
  return sorted({*own_tests(changed, root)} | {path for path in found if (root / path).exists()})


if __name__ == "__main__":
  if sys.argv[1:2] == ["--rooms"]:
    print(f"--concerned={','.join(of_rooms(sys.argv[2:]))}")
    sys.exit()
  print(f"--whole={','.join(own_tests(sys.argv[1:]))}", *concerned(sys.argv[1:]), sep="\n")
