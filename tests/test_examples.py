"""Links, README's program, command flags in the documentation, and tidy examples.

The examples themselves are run by launch/test.sh, against the built wheel alone.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import pathlib
import re
import types

import pytest

from seerjax.commands import flags as flags_lib
from seerjax.commands.check import CheckConfig
from seerjax.discovery.config import DiscoverConfig
from seerjax.run import presets as run_presets

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
  "README.md", "CONTRIBUTING.md", "seerjax/models/nano/README.md", "pallas_kernels/README.md"
)  # fmt: skip
GUIDES = ROOT / "docs" / "guides"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
OURS = ("seerjax", "pallas_kernels")
MAX_README_PROGRAM_LINES = 8
MAX_README_LINES = 120


def readme_program() -> str:
  blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
  return next(block for block in blocks if "generate" in block)


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page: str):
  path = ROOT / page
  links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
  missing = [x for x in links if "://" not in x and not (path.parent / x).exists()]
  assert not missing, f"{page}: got links to {missing}, expected files that exist"


def test_the_readme_is_short_and_so_is_its_program():
  assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES
  lines = [line for line in readme_program().splitlines() if line.strip()]
  assert len(lines) <= MAX_README_PROGRAM_LINES


@pytest.mark.thorough
def test_the_program_of_the_readme_answers(capsys: pytest.CaptureFixture[str]):
  scope: dict = {}
  exec(readme_program(), scope)
  answer = scope["answer"]
  assert answer.finish_reason == "stop"
  assert len(answer.behaviour_logprobs) == len(answer.tokens)
  assert capsys.readouterr().out.startswith(answer.text)


def flags_of(text: str) -> list[str]:
  return re.findall(r"--config\.[a-z_.]+=[^\s`]+", text)


def test_the_flags_of_the_pages_exist():
  pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(GUIDES.glob("*.md"))]
  num_flags = 0
  for page in pages:
    for line in page.read_text().splitlines():
      is_discovery = page.stem in ("discovery", "problem") or re.search(
        r"ttt_|--preset|--config\.problem=\w", line
      )
      default = DiscoverConfig() if is_discovery else run_presets.main_job()
      if re.search(r"\bcheck --config", line):
        default = CheckConfig()
      flags_lib.check_names(default, flags_of(line))
      num_flags += len(flags_of(line))
  assert num_flags >= 20


def test_a_flag_that_does_not_exist_is_seen():
  with pytest.raises(ValueError, match="did you mean 'task'"):
    flags_lib.check_names(run_presets.main_job(), flags_of("`--config.tsk=x`"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_how_to_run_it_and_how_long_it_takes(path: pathlib.Path):
  docstring = ast.get_docstring(ast.parse(path.read_text()))
  assert docstring is not None
  assert f"python examples/{path.name}" in docstring
  assert "\nTakes " in docstring


def code_of(path: pathlib.Path) -> str:
  """Returns the code of a program or of a notebook's cells."""
  if path.suffix == ".py":
    return path.read_text()
  cells = json.loads(path.read_text())["cells"]
  return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def unknown_names(code: str) -> list[str]:
  """Returns what a program imports from our packages, or reads off their modules, and is not there.

  Nothing of the program is run; a name that it binds anew is not followed.
  """
  unknown: list[str] = []

  def member(owner: types.ModuleType, name: str) -> object:
    whole = f"{owner.__name__}.{name}"
    if hasattr(owner, "__path__") and importlib.util.find_spec(whole) is not None:
      return importlib.import_module(whole)
    if not hasattr(owner, name):
      unknown.append(whole)
      return None
    return getattr(owner, name)

  tree, modules = ast.parse(code), {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
      owner = importlib.import_module(node.module)
      found = {alias.asname or alias.name: member(owner, alias.name) for alias in node.names}
      modules |= {name: one for name, one in found.items() if isinstance(one, types.ModuleType)}
    if isinstance(node, ast.Import):
      for alias in node.names:
        if alias.name.split(".")[0] in OURS:
          whole = importlib.import_module(alias.name)
          top = importlib.import_module(alias.name.split(".")[0])
          modules[alias.asname or top.__name__] = whole if alias.asname else top

  def module_of(node: ast.expr) -> types.ModuleType | None:
    if isinstance(node, ast.Name):
      return modules.get(node.id)
    owner = module_of(node.value) if isinstance(node, ast.Attribute) else None
    if owner is None or not hasattr(owner, node.attr):
      return None
    found = getattr(owner, node.attr)
    return found if isinstance(found, types.ModuleType) else None

  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and (owner := module_of(node.value)) is not None:
      member(owner, node.attr)
  return sorted(set(unknown))


@pytest.mark.parametrize("path", [*EXAMPLES, *NOTEBOOKS], ids=lambda path: path.name)
def test_an_example_names_only_what_exists(path: pathlib.Path):
  unknown = unknown_names(code_of(path))
  assert not unknown, f"{path.name}: got {unknown}, expected what exists"


def test_a_name_that_was_moved_is_seen():
  code = """
import seerjax.models.head
from seerjax import NumericsConfig, gone
from seerjax.models import transformer as model
model.forward, model.init(0)
seerjax.models.head.sample_and_score, seerjax.models.head.lost
NumericsConfig.anything
"""
  assert unknown_names(code) == [
    "seerjax.gone", "seerjax.models.head.lost", "seerjax.models.transformer.init"
  ]  # fmt: skip


def test_the_notebook_is_committed_without_output():
  cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert code
  for cell in code:
    assert cell["outputs"] == [] and cell["execution_count"] is None
    ast.parse("".join(cell["source"]))


def test_the_notebook_asserts_what_it_claims():
  text = (ROOT / "examples" / "quickstart.ipynb").read_text()
  assert "assert set(gap.values()) == {0.0}" in text
