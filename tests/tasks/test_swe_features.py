"""The task asks which files a commit modifies; the tests make a small repository."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from seerjax.tasks import stateful, swe_features
from seerjax.tasks.swe_features import SWEConfig

CONFIG = SWEConfig(min_files=2, num_history=2)


def git(path: pathlib.Path, *arguments: str) -> None:
  fields = [f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
  environment = os.environ | dict.fromkeys(fields, "a@b") | {"GIT_CONFIG_GLOBAL": os.devnull}
  command = ["git", "-C", str(path), *arguments]
  subprocess.run(command, check=True, capture_output=True, env=environment)


def commit(path: pathlib.Path, message: str, *files: str) -> None:
  """Writes each file anew and commits; a file named "-x" is deleted."""
  for file in files:
    if file.startswith("-"):
      (path / file[1:]).unlink()
    else:
      (path / file).parent.mkdir(exist_ok=True)
      (path / file).write_text(message)
  git(path, "add", "-A")
  git(path, "commit", "-q", "-m", message)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("repository")
  git(path, "init", "-q", "-b", "main")
  commit(path, "begin", "a.py", "b.py", "c d.py", "lib/e.js", "notes.txt")
  commit(path, "two\n\nand why", "a.py", "b.py", "notes.txt", "new.py")
  commit(path, "one", "a.py")
  git(path, "checkout", "-q", "-b", "side", "HEAD~1")
  commit(path, "aside", "lib/e.js", "b.py")
  git(path, "checkout", "-q", "main")
  git(path, "merge", "-q", "--no-ff", "side", "-m", "merged")
  commit(path, "gone and changed", "-c d.py", "new.py", "fresh.py")
  return path


def test_commits_are_asked_about_the_tree_before_them(repository: pathlib.Path):
  task = swe_features.load(repository, CONFIG)
  contexts = task.contexts("test")
  asked = [task.questions("test", index) for index in range(len(contexts))]
  assert [(q.question, q.answer) for (q,) in asked] == [
    ("two\n\nand why", "a.py\nb.py"),  # New files and text files do not count.
    ("merged", "b.py\nlib/e.js"),
    ("gone and changed", "c d.py\nnew.py"),
  ]
  assert contexts[0].text == (
    "Files:\na.py\nb.py\nc d.py\nlib/e.js\n\nEarlier commits, oldest first:\n- begin: other files"
  )
  assert contexts[2].text.endswith("- one: a.py\n- merged: b.py, lib/e.js")
  assert isinstance(task, stateful.StatefulTask)
  assert task.facts(contexts[0]) == ""
  assert task.sleep_prompt(contexts[0]).startswith(contexts[0].text)
  assert task.wake_prompt("Q", "C").endswith(swe_features.INSTRUCTION)


def test_several_commits_are_asked_about_one_tree(repository: pathlib.Path):
  config = SWEConfig(min_files=2, num_questions=3)
  task = swe_features.load(repository, config)
  (context,) = task.contexts("test")
  # new.py, a file of the last commit, did not exist yet.
  assert [q.answer.split("\n") for q in task.questions("test", 0)] == [
    ["a.py", "b.py"], ["b.py", "lib/e.js"], ["c d.py"],
  ]  # fmt: skip
  assert "new.py" not in context.text


def test_a_folder_restricts_tree_and_commits(repository: pathlib.Path):
  task = swe_features.load(repository, SWEConfig(min_files=1, under="lib"))
  (context,) = task.contexts("test")
  assert context.text.startswith("Files:\nlib/e.js\n")
  assert [q.question for q in task.questions("test", 0)] == ["merged"]


@pytest.mark.parametrize(
  "text, reward, is_well_formed",
  [
    ("#### a.py\nb.py", 1.0, True),
    ("a.py ####\n- `./b.py`\n* a.py\n", 1.0, True),
    ("####\na.py", 2 / 3, True),
    ("####\na.py\nb.py\nc.py\nd.py", 2 / 3, True),
    ("#### x.py\n#### b.py", 2 / 3, True),  # The last mark counts.
    ("a.py\nb.py", 0.0, False),
    ("####", 0.0, False),
  ],
)
def test_answers_are_judged_by_f1(repository, text: str, reward: float, is_well_formed: bool):
  task = swe_features.load(repository, CONFIG)
  (problem,) = task.questions("test", 0)
  verdict = task.verdict(problem, text)
  assert verdict.reward == reward and verdict.well_formed == is_well_formed
  assert verdict.correct == (reward == 1.0)


def test_nothing_of_the_repository_is_run(repository: pathlib.Path, tmp_path: pathlib.Path):
  copy = tmp_path / "copy"
  subprocess.run(["git", "clone", "-q", str(repository), str(copy)], check=True)
  mark = tmp_path / "ran"
  for name in ("core.fsmonitor", "core.pager", "gpg.program", "diff.external"):
    git(copy, "config", name, f"touch {mark}; false")
  git(copy, "config", "log.showSignature", "true")
  assert swe_features.load(copy, CONFIG).contexts("test")[0].text
  assert not mark.exists()


def test_what_is_no_repository_is_refused(repository: pathlib.Path, tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match="from 'git rev-list', expected a repository with commits"):
    swe_features.load(tmp_path)
  git(tmp_path, "init", "-q")
  with pytest.raises(ValueError, match="from 'git rev-list', expected a repository with commits"):
    swe_features.load(tmp_path)
  message = "got 5 commits, none of which modifies 3 to 20 files that end with .py or .js"
  with pytest.raises(ValueError, match=re.escape(message)):
    swe_features.load(repository)
  task = swe_features.load(repository, CONFIG)
  with pytest.raises(ValueError, match="swe_features: got split 'train', expected one of"):
    task.contexts("train")


@pytest.mark.usefixtures("unchecked_annotations")  # The check would build a context.
def test_a_tree_that_is_too_large_is_refused(repository: pathlib.Path):
  task = swe_features.load(repository, SWEConfig(min_files=2, max_tree=3))
  with pytest.raises(ValueError, match="got 4 files in the tree of .*, expected at most max_tree"):
    task.questions("test", 0)


def test_slow_loud_and_absent_programs_are_refused(tmp_path: pathlib.Path):
  ask = swe_features._output
  filler = ["x"] * (len(swe_features._GIT) + 1)
  slow = [sys.executable, "-c", "import time; time.sleep(60)", *filler]
  with pytest.raises(TimeoutError, match="'git .*' did not end in 0.3 seconds, expected less"):
    ask(tmp_path, slow, 0.3, b"")
  loud = [sys.executable, "-c", "import sys\nfor _ in range(70): sys.stdout.write('x' * (1 << 20))"]
  with pytest.raises(ValueError, match="got more than 64 MiB from 'git .*', expected less"):
    ask(tmp_path, [*loud, *filler], 60.0, b"")
  with pytest.raises(FileNotFoundError, match="got no 'no-such-git' on this machine"):
    ask(tmp_path, ["no-such-git"], 1.0, b"")
