"""The docs site builds, covers every public name, and its guides are programs that run.

mkdocs.yml, docs/*.md, docstrings -- mkdocs build --strict --> pages without network requests
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLIC_API = ROOT / "tests" / "public_api.txt"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# ([a-z_]+\.py)\n")  # The first line of a block that is a file.
# URLs that a browser loads when a page opens; links that a user clicks do not count.
ASKED = re.compile(
  r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'> ]+"
  r"|<link\b[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload|icon)[^>]*\bhref=[\"']?(?:https?:)?//"
  r"|@import\s+[^;]*//|url\([\"']?(?:https?:)?//"
)


def build(source: pathlib.Path, folder: pathlib.Path) -> tuple[int, list[str]]:
  """Builds the site of `source`/mkdocs.yml; returns the exit code and all warnings.

  A quieter log level would be wrong: mkdocs counts only printed warnings, even with --strict. Skips
  where launch/locks/docs-*.txt is not installed.
  """
  if importlib.util.find_spec("mkdocs") is None:
    pytest.skip("mkdocs is not installed: pip install -r launch/locks/docs-3.13.txt")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
  done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
  lines = (done.stdout + done.stderr).splitlines()
  assert any("Building documentation" in line for line in lines), lines
  return done.returncode, [line for line in lines if not line.startswith("INFO")]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
  """Returns the built site."""
  folder = tmp_path_factory.mktemp("site")
  status, warnings = build(ROOT, folder)
  assert status == 0 and not warnings, "\n".join(warnings)
  return folder


# Faults of a page or a docstring, and the text of their warnings.
SOUND = "[a page](other.md#a-part), [a name][tiny.f]\n\n::: tiny\n"
FAULTS = {
  "nothing": ("", ""),
  "a page that is not there": ("[a](missing.md)", "missing.md"),
  "a part that is not there": ("[a](other.md#none)", "none"),
  "a link to nothing": ("[a](x)", "unrecognized relative link 'x'"),
  "a link to a place of a server": ("[a](/other.md)", "absolute link"),
  "a name that is not there": ("[a][tiny.g]", "tiny.g"),
  "an argument that is not there": ("::: wrong", "'y' does not appear"),
  "an argument without a type": ("::: bare", "No type or annotation for parameter 'x'"),
  "a module that is not there": ("::: tinier", "tinier"),
  "a file that is not there": ('--8<-- "none.py"', "none.py"),
}
TINY = """'''A module.'''


def f(x: int) -> int:
  '''Returns it.

  Args:
    x: a number.
  '''
  return x
"""
WRONG = TINY.replace("    x: a", "    y: a").replace("def f", "def wrong")
BARE = TINY.replace("x: int) -> int", "x)").replace("def f", "def bare")


@pytest.mark.parametrize(
  "fault",
  [
    pytest.param(fault, marks=[] if fault == "a link to nothing" else pytest.mark.thorough)
    for fault in FAULTS
  ],
)
def test_a_fault_of_a_page_ends_the_building(fault: str, tmp_path: pathlib.Path):
  text, warning = FAULTS[fault]
  (tmp_path / "docs" / "reference").mkdir(parents=True)
  (tmp_path / "docs" / "index.md").write_text(f"# A site\n\n{SOUND}\n{text}\n")
  (tmp_path / "docs" / "other.md").write_text("# Another\n\n## A part\n")
  extension = "reference/fields.py"
  (tmp_path / "docs" / extension).write_text((DOCS / extension).read_text())
  for name, source in (("tiny", TINY), ("wrong", WRONG), ("bare", BARE)):
    (tmp_path / f"{name}.py").write_text(source)
  ours = (ROOT / "mkdocs.yml").read_text()
  own = re.sub(r"^nav:.*", "nav: [index.md, other.md]\n", ours, flags=re.MULTILINE | re.DOTALL)
  (tmp_path / "mkdocs.yml").write_text(own.replace("extra_css: [site.css]\n", ""))
  status, warnings = build(tmp_path, tmp_path / "built")
  text = "\n".join(warnings)
  assert (status == 0) == (not warning), text
  assert warning in text


def public_names(text: str) -> list[str]:
  """Returns the dotted names that a list of public signatures declares, methods and fields too."""
  names: list[str] = []
  path: list[str] = []  # By depth: a module, a class in it, a member of the class.
  for line in text.splitlines():
    name = re.match(
      r"( *)(?:@[\w.]+ )*(?:class |def )?([A-Za-z_][\w.]*)(?:\(|:| = | ->|$|, from (.*)$)", line
    )
    if name is None:
      continue
    indent, word, home = name.groups()
    if home:  # A top-level name: the following lines belong to its own module.
      path = [home]
    elif not indent:
      path = [word]
    else:
      path = [*path[: len(indent) // 2], word]
      if word != "__init__":  # It is listed with its class.
        names.append(".".join(path))
  return names


def anchors(site: pathlib.Path) -> set[str]:
  pages = (site / "reference").glob("*.html")
  return {anchor for page in pages for anchor in re.findall(r'\bid="([^"]+)"', page.read_text())}


def test_names_are_read_from_signatures():
  text = """seerjax.A, from seerjax.types
  class A(B)
    x: int = 3
    @property def y(self) -> int

seerjax.types
  K = 4
  def f(x: int) -> int
"""
  assert public_names(text) == [
    "seerjax.types.A", "seerjax.types.A.x", "seerjax.types.A.y", "seerjax.types.K",
    "seerjax.types.f",
  ]  # fmt: skip


@pytest.mark.thorough
def test_every_public_name_is_in_the_reference(site: pathlib.Path):
  names = public_names(PUBLIC_API.read_text())
  assert len(names) > 100
  missing = sorted(set(names) - anchors(site))
  assert not missing, f"the reference lacks {missing}; a page of docs/reference names their module"
  assert "seerjax.types.Sheduler" not in anchors(site)


def test_every_room_has_a_page():
  pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
  shown = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))
  found = {
    f"seerjax.{path.stem}"
    for path in (ROOT / "seerjax").iterdir()
    if (path.suffix == ".py" or (path / "__init__.py").exists()) and not path.stem.startswith("_")
  }
  assert found | {"pallas_kernels"} == shown


def test_the_front_door_is_listed_whole():
  import seerjax

  listed = re.findall(r"^\| \[`seerjax\.(\w+)`\]", (DOCS / "reference/index.md").read_text(), re.M)
  assert listed == seerjax.__all__


def test_a_page_asks_no_network(site: pathlib.Path):
  asked = {
    f"{path.relative_to(site)}: {found}"
    for path in (*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg"))
    for found in ASKED.findall(path.read_text())
  }
  assert not asked


@pytest.mark.parametrize(
  "text",
  [
    '<script src="https://x.org/a.js">',
    '<link href="a" rel="stylesheet" href="//x.org/a.css">',
    "src: url(https://x.org/a.woff2)",
  ],
)
def test_a_page_that_asks_is_seen(text: str):
  assert ASKED.search(text)


def test_guides_have_programs():
  assert sum(len(BLOCK.findall(path.read_text())) for path in GUIDES) >= 10


def program_of(guide: pathlib.Path, folder: pathlib.Path) -> str:
  """Writes the guide's files into the folder; returns its other blocks, one after the other.

  Blocks that begin with the name of a file are that file, and are imported in their place.
  """
  programs = []
  for block in BLOCK.findall(guide.read_text()):
    name = FILE_NAME.match(block)
    if name is None:
      programs.append(block)
    else:
      (folder / name[1]).write_text(block)
      programs.append(f"import {name[1].removesuffix('.py')}\n")
  return "\n".join(programs)


# Runs what folders hold, each in a process that has imported already what all of them import.
RUN_EACH = """
import os, runpy, sys
import seerjax
for name in seerjax.__all__:
  getattr(seerjax, name)
for folder in sys.argv[1:]:
  child = os.fork()
  if not child:
    os.chdir(folder)
    sys.path.insert(0, folder)
    output = os.open("output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1), os.dup2(output, 2)
    runpy.run_path("guide_of_docs.py", run_name="__main__")
    open("passed", "w").close()
    sys.exit()
  os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def run_guides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
  """Runs the programs of all guides that have one; returns name -> output folder."""
  folders = {}
  for guide in GUIDES:
    folder = tmp_path_factory.mktemp(guide.stem)
    program = program_of(guide, folder)
    if program:
      (folder / "guide_of_docs.py").write_text(program)
      folders[guide.stem] = folder
  subprocess.run([sys.executable, "-c", RUN_EACH, *map(str, folders.values())], check=True)
  return folders


@pytest.mark.thorough
@pytest.mark.parametrize("name", [guide.stem for guide in GUIDES])
def test_the_programs_of_a_guide_run(name: str, run_guides: dict[str, pathlib.Path]):
  if name not in run_guides:
    pytest.skip("no program on this page")
  assert (run_guides[name] / "passed").exists(), (run_guides[name] / "output").read_text()
