"""What the front of the house promises: links, README's program, settled signatures, tidy examples.

The examples themselves are run by launch/test.sh, against the built wheel alone.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re

import pytest

from experiments import configuration, grpo
from seerjax import ttt

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
  "README.md", "CONTRIBUTING.md", "seerjax/models/nano/README.md", "pallas_kernels/README.md"
)  # fmt: skip
SETTLED = re.findall(
  r"`(seerjax/[a-z_/]+\.py)`\n\n```python\n(.*?)```",
  (ROOT / "CONTRIBUTING.md").read_text(),
  re.DOTALL,
)
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_README_PROGRAM_LINES = 20


def readme_program() -> str:
  blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
  return next(block for block in blocks if "generate" in block)


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page: str):
  path = ROOT / page
  links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
  missing = [x for x in links if "://" not in x and not (path.parent / x).exists()]
  assert not missing, f"{page}: got links to {missing}, expected files that exist"


def test_the_program_of_the_readme_is_short():
  lines = [line for line in readme_program().splitlines() if line.strip()]
  assert len(lines) <= MAX_README_PROGRAM_LINES


def test_the_program_of_the_readme_answers(capsys: pytest.CaptureFixture[str]):
  scope: dict = {}
  exec(readme_program(), scope)
  answer = scope["answer"]
  assert answer.finish_reason == "stop"
  assert len(answer.behaviour_logprobs) == len(answer.tokens)
  assert capsys.readouterr().out.startswith(answer.text)


def signatures(source: str, wanted: set[str] | None = None) -> dict[str, object]:
  """Returns by name: a function's arguments and defaults; a class's fields and public methods."""

  def shape(node: ast.FunctionDef) -> object:
    args = node.args
    return (
      [a.arg for a in args.posonlyargs + args.args],
      [a.arg for a in args.kwonlyargs],
      [ast.unparse(d) for d in args.defaults],
      [d and ast.unparse(d) for d in args.kw_defaults],
    )

  found: dict[str, object] = {}
  for node in ast.parse(source).body:
    if isinstance(node, ast.FunctionDef):
      found[node.name] = shape(node)
    elif isinstance(node, ast.ClassDef):
      members: list[object] = []
      for member in node.body:
        if isinstance(member, ast.AnnAssign):
          members.append((ast.unparse(member.target), member.value and ast.unparse(member.value)))
        elif isinstance(member, ast.FunctionDef):
          if not member.name.startswith("_") or member.name == "__init__":
            members.append((member.name, shape(member)))
      found[node.name] = members
  return {name: found[name] for name in found if wanted is None or name in wanted}


def test_the_flags_of_the_readme_exist():
  text = (ROOT / "README.md").read_text()
  discovery = text[text.index("## One problem") : text.index("## Experiments")]
  for default, part, least in (
    (ttt.DiscoverConfig(), discovery, 3), (grpo.main_job(), text.replace(discovery, ""), 6)
  ):  # fmt: skip
    flags = re.findall(r"--config\.[a-z_.]+=[^\s`]+", part)
    assert len(flags) >= least
    configuration.check_names(default, flags)


def test_rooms_have_settled_signatures():
  rooms = {path.split("/")[1].removesuffix(".py") for path, _ in SETTLED}
  assert {"types", "models", "engine", "rollout", "trainer"} <= rooms


@pytest.mark.parametrize(("path", "text"), SETTLED, ids=[path for path, _ in SETTLED])
def test_settled_signatures_are_those_of_the_source(path: str, text: str):
  settled = signatures(text)
  got = signatures((ROOT / path).read_text(), set(settled))
  assert got == settled, (
    f"{path}: got other signatures than CONTRIBUTING.md's; if the change is meant, change the list"
    " under 'Signatures settled' and name it in CHANGELOG.md."
  )


def test_a_changed_default_is_seen():
  assert signatures("def f(x, *, y=1): ...") != signatures("def f(x, *, y=2): ...")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_how_to_run_it_and_how_long_it_takes(path: pathlib.Path):
  docstring = ast.get_docstring(ast.parse(path.read_text()))
  assert docstring is not None
  assert f"python examples/{path.name}" in docstring
  assert "\nTakes " in docstring


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
