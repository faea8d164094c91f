"""The import graph of a small tree, by hand."""

from __future__ import annotations

import pathlib

import import_graph
import pytest

FILES = {
  "seerjax/__init__.py": "",
  "seerjax/types.py": "",
  "seerjax/ops/__init__.py": "",
  "seerjax/ops/tiles.py": "from seerjax import types",
  "seerjax/trainer/__init__.py": "",
  "seerjax/trainer/step.py": "def f():\n  from seerjax.ops.tiles import rows",
  "seerjax/engine/__init__.py": "",
  "seerjax/engine/engine.py": "from seerjax.engine import pages",
  "seerjax/engine/pages.py": "",
  "seerjax/rl.py": "import seerjax.trainer.step\nfrom seerjax.engine import engine",
  "tests/conftest.py": "",
  "tests/support/small.py": "from seerjax.ops import tiles",
  "tests/contract/test_bits.py": "",
  "tests/engine/test_pages.py": "",
  "experiments/grpo.py": "from seerjax import rl",
  "tests/experiments/test_grpo.py": "",
  "tests/launch/test_local.py": "",
  "tests/engine/conftest.py": "",
  "tests/run/conftest.py": "import small",
  "tests/run/test_run.py": "",
  "tests/trainer/test_step.py": "import small",
  "tests/test_rl.py": "",
  "tests/test_small.py": "import small",
  "tests/test_other.py": "from seerjax import types",
}


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
  for name, source in FILES.items():
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
  return tmp_path


def test_the_graph_is_that_of_the_statements(tree: pathlib.Path):
  graph = import_graph.graph(tree)
  assert graph["seerjax.ops.tiles"] == {"seerjax.types"}
  assert graph["seerjax.trainer.step"] == {"seerjax.ops.tiles"}
  assert graph["seerjax.rl"] == {"seerjax.trainer.step", "seerjax.engine.engine"}
  assert graph["small"] == {"seerjax.ops.tiles"}
  assert import_graph.circles(graph) == []


def test_a_circle_is_found_within_functions_too(tree: pathlib.Path):
  (tree / "seerjax/engine/pages.py").write_text("def f():\n  from seerjax.engine import engine")
  assert import_graph.circles(import_graph.graph(tree)) == [
    ["seerjax.engine.engine", "seerjax.engine.pages"]
  ]


@pytest.mark.parametrize(
  "changed, expected",
  [
    ([], []),
    (["seerjax/trainer/step.py"], ["tests/trainer/test_step.py"]),
    (["seerjax/rl.py", "seerjax/engine/engine.py"], ["tests/test_rl.py"]),
    # Part of a folder that is tested as a whole.
    (["seerjax/trainer/step/parts.py"], ["tests/trainer/test_step.py"]),
    (["experiments/grpo.py", "README.md"], ["tests/experiments/test_grpo.py"]),
    (["tests/engine/test_pages.py"], ["tests/engine/test_pages.py"]),
    ([".ci/run"], ["tests/launch/test_local.py"]),
  ],
)
def test_what_runs_whole_is_what_changed_and_what_is_named_after_it(
  tree: pathlib.Path, changed: list[str], expected: list[str]
):
  assert import_graph.own_tests(changed, tree) == expected


@pytest.mark.parametrize(
  "changed, expected",
  [
    (["README.md"], ["tests/contract"]),
    (["seerjax/engine/pages.py"],
     ["tests/contract", "tests/engine", "tests/experiments", "tests/test_rl.py"]),
    (["seerjax/trainer/step.py"],
     ["tests/contract", "tests/experiments", "tests/test_rl.py", "tests/trainer"]),
    (
      ["seerjax/ops/tiles.py"],
      [
        "tests/contract",
        "tests/experiments",
        "tests/test_rl.py",
        "tests/test_small.py",
        "tests/trainer",
      ],
    ),
    (["tests/support/small.py"],
     ["tests/contract", "tests/run", "tests/test_small.py", "tests/trainer/test_step.py"]),
    (["tests/engine/conftest.py"], ["tests/contract", "tests/engine"]),
    (["tests/engine/test_pages.py"], ["tests/contract", "tests/engine/test_pages.py"]),
    (["launch/local.sh"], ["tests/contract", "tests/launch/test_local.py"]),
    (["experiments/grpo.py"], ["tests/contract", "tests/experiments"]),
    (["seerjax/rl.py", "tests/conftest.py"], ["tests"]),
  ],
)  # fmt: skip
def test_a_change_concerns_its_room_and_those_above(
  tree: pathlib.Path, changed: list[str], expected: list[str]
):
  assert import_graph.concerned(changed, tree) == expected


@pytest.mark.parametrize(
  "changed, expected",
  [
    (["README.md"], []),
    (["seerjax/engine/pages.py"], ["tests/engine", "tests/engine/test_pages.py"]),
    (["seerjax/rl.py", "seerjax/ops/tiles.py"], ["tests/test_rl.py"]),
    (["experiments/grpo.py"], ["tests/experiments", "tests/experiments/test_grpo.py"]),
    (["tests/trainer/test_step.py", "tests/support/small.py"], ["tests/trainer/test_step.py"]),
    (["launch/local.sh"], ["tests/launch/test_local.py"]),
  ],
)
def test_a_changed_file_has_a_room(tree: pathlib.Path, changed: list[str], expected: list[str]):
  assert import_graph.of_rooms(changed, tree) == expected
