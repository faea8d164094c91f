"""Predicts the files that a commit modifies, from the history of a local git repository.

  context    the tree before the commit, and earlier commits
  question   the commit message
  answer     the existing files that the commit changes or deletes; the reward is F1

Nothing from the repository is executed: git runs with hooks, pagers, file monitors and signatures
disabled, and with limited time and output.

Source: SWE-Features of Lin et al. 2025, https://arxiv.org/abs/2504.13171, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import os
import pathlib
import subprocess
import tempfile
import threading
from typing import NamedTuple

from seerjax import fields
from seerjax.tasks import answers, splits, stateful
from seerjax.tasks.stateful import StatefulContext
from seerjax.types import Problem, Verdict

SPLIT = "test"
INSTRUCTION = (
  f"Which of the files does this change modify? End with a line that says {answers.ANSWER_MARK},"
  " and then the paths, one a line."
)
SLEEP_INSTRUCTION = (
  "Changes to this repository will be described later, and the files that each modifies asked for."
  " Work out now what may be useful for that: which file is responsible for what, and which are"
  " changed together."
)
MAX_BYTES = 64 << 20  # Of output of one git command.
MAX_MESSAGE = 2_000  # Characters of a commit message.
_GIT = (
  "git", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null",
  "-c", "log.showSignature=false", "-c", "core.quotePath=false",
)  # fmt: skip
_EXISTING = "MDT"  # Statuses of changes to existing files: modified, deleted, type changed.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SWEConfig:
  """Selection of commits, and contents of prompts.

  Attributes:
    extensions: extensions of files that count, such as (".py", ".js").
    under: folder to which tree and commits are restricted; "" for all.
    min_files: fewest files that a commit modifies.
    max_files: most files; larger commits are usually mechanical.
    num_history: earlier commits in the context.
    num_questions: commits asked about per tree, which is the tree before the first of them.
    max_commits: number of newest commits to read.
    max_tree: most files in a tree.
    timeout_seconds: timeout of one git command.
  """

  extensions: tuple[str, ...] = (".py", ".js")
  under: str = ""
  min_files: int = 3
  max_files: int = 20
  num_history: int = 20
  num_questions: int = 1
  max_commits: int = 2_000
  max_tree: int = 5_000
  timeout_seconds: float = 60.0

  def __post_init__(self):
    one = fields.at_least(1)
    fields.check(
      self, min_files=one, num_questions=one, max_commits=one, max_tree=one,
      max_files=fields.Rule(
        f"at least min_files = {self.min_files}", lambda most: most >= self.min_files, "raise it"
      ),
      num_history=fields.at_least(0), timeout_seconds=fields.positive("raise it"),
    )  # fmt: skip


class Commit(NamedTuple):
  """A commit of a git repository.

  Attributes:
    commit_id: 40 or 64 hexadecimal digits.
    parent: id of its first parent; "" for the first commit.
    message: message, stripped.
    files: files of the first parent's tree that it changes or deletes, sorted.
  """

  commit_id: str
  parent: str
  message: str
  files: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SWEFeatures:
  """Questions about commits of a repository, as a task; see `load`.

  Attributes:
    path: path of the repository.
    config: selection of commits.
    history: commits that were read, oldest first, along first parents.
    blocks: for each tree, indices in `history` of the commits asked about.
    name: name of the task.
  """

  path: pathlib.Path
  config: SWEConfig
  history: tuple[Commit, ...]
  blocks: tuple[tuple[int, ...], ...]
  name: str = "swe_features"

  def contexts(self, split: str) -> stateful.LazyContexts:
    """Returns the contexts of "test", oldest first; trees are read on access.

    Raises:
      ValueError: for another split.
    """
    if split != SPLIT:
      raise splits.unknown_split(self.name, split, (SPLIT,))
    return stateful.LazyContexts(self._context, len(self.blocks))

  def questions(self, split: str, context: int) -> tuple[Problem, ...]:
    """Returns the commits of one context as problems; skips commits without files of the tree."""
    splits.check_index(self.name, split, context, len(self.contexts(split)))
    text, tree = self._context(context).text, set(self._tree(context))
    found = []
    for place in self.blocks[context]:
      commit = self.history[place]
      files = [file for file in commit.files if file in tree]
      if files:
        found.append(
          Problem(
            problem_id=commit.commit_id,
            prompt=f"{text}\n\n{commit.message}",
            context=text,
            question=commit.message,
            answer="\n".join(files),
          )
        )
    return tuple(found)

  def sleep_prompt(self, context: StatefulContext) -> str:
    """Returns tree and earlier commits, with the instruction to work ahead."""
    return f"{context.text}\n\n{SLEEP_INSTRUCTION}"

  def facts(self, context: StatefulContext) -> str:
    """Returns "", because a perfect rewrite is unknown."""
    return context.facts

  def wake_prompt(self, question: str, context: str = "", rewritten: str = "") -> str:
    """Returns known text, commit message and answer format."""
    prompt = stateful.joined_prompt(question, context, rewritten, joint="\n\n")
    return f"{prompt}\n\n{INSTRUCTION}"

  def verdict(self, problem: Problem, text: str) -> Verdict:
    """Returns F1 of the paths after the last answer mark; never raises."""
    wanted, named = set(problem.answer.split("\n")), named_files(text)
    reward = 2 * len(wanted & named) / (len(wanted) + len(named))
    return Verdict(
      reward=reward,
      correct=named == wanted,
      well_formed=bool(named),
      answer="\n".join(sorted(named)),
    )

  def _tree(self, index: int) -> tuple[str, ...]:
    return _tree_of(self.path, self.config, self.history[self.blocks[index][0]].parent)

  def _context(self, index: int) -> StatefulContext:
    first = self.blocks[index][0]
    commits = self.history[max(0, first - self.config.num_history) : first]
    earlier = [
      f"- {commit.message.partition(chr(10))[0]}: {', '.join(commit.files) or 'other files'}"
      for commit in commits
    ]
    parts = ["Files:", *self._tree(index)]
    if earlier:
      parts += ["", "Earlier commits, oldest first:", *earlier]
    return StatefulContext(
      context_id=f"{self.name}-{self.history[first].parent}", text="\n".join(parts), kind="tree"
    )


def named_files(text: str) -> set[str]:
  """Returns the paths in an answer: one per line after the last mark, without bullets or quotes."""
  if answers.ANSWER_MARK not in text:
    return set()
  lines = text.rpartition(answers.ANSWER_MARK)[2].split("\n")
  bare = (line.strip().removeprefix("- ").removeprefix("* ").strip(" `'\"") for line in lines)
  return {line.removeprefix("./") for line in bare if line}


def load(path: str | os.PathLike[str], config: SWEConfig = SWEConfig()) -> SWEFeatures:
  """Reads the history of a repository.

  Args:
    path: path of a git repository, bare or with a work tree.
    config: selection of commits.

  Raises:
    FileNotFoundError: if the folder or git is missing.
    ValueError: if it is not a repository, or has no suitable commit.
    TimeoutError: if git exceeds its timeout.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    raise FileNotFoundError(
      f"{path}: got no such folder, expected a git repository; correct the path."
    )
  count = str(config.max_commits)
  # For a repository without commits, git itself reports an error on HEAD.
  listed = _git(path, config, "rev-list", "--first-parent", "--parents", "-n", count, "HEAD", "--")
  parents = {}
  for line in listed.decode().splitlines():
    commit_id, *of = line.split()
    parents[commit_id] = of[0] if of else ""
  messages = {}
  options = ("--first-parent", "-n", count, "-z", "--format=%H%n%B")
  raw = _git(path, config, "log", *options, "HEAD", "--")
  for entry in raw.decode(errors="replace").split("\0"):
    commit_id, _, message = entry.partition("\n")
    messages[commit_id.strip()] = message.strip()[:MAX_MESSAGE].strip()
  files = _changed(path, config, parents)
  history = tuple(
    Commit(commit_id, parents[commit_id], messages.get(commit_id, ""), files.get(commit_id, ()))
    for commit_id in reversed(parents)
  )
  asked = [
    place
    for place, commit in enumerate(history)
    if config.min_files <= len(commit.files) <= config.max_files and commit.message
  ]
  blocks = tuple(
    tuple(asked[start : start + config.num_questions])
    for start in range(0, len(asked), config.num_questions)
  )
  if not blocks:
    raise ValueError(
      f"{path}: got {len(history)} commits, none of which modifies {config.min_files} to"
      f" {config.max_files} files that end with {' or '.join(config.extensions)}, expected at least"
      " one; lower SWEConfig.min_files, or name other extensions."
    )
  return SWEFeatures(path=path, config=config, history=history, blocks=blocks)


def _changed(
  path: pathlib.Path, config: SWEConfig, parents: dict[str, str]
) -> dict[str, tuple[str, ...]]:
  """Returns the existing files that each commit changes, along first parents."""
  pairs = "".join(f"{commit} {parent}\n" for commit, parent in parents.items() if parent)
  options = ("-r", "-z", "--no-renames", "--name-status", "--no-ext-diff", "--no-textconv")
  raw = _git(path, config, "diff-tree", "--stdin", *options, given=pairs.encode())
  found: dict[str, list[str]] = {}
  words = iter(raw.decode(errors="replace").split("\0"))
  commit_id = ""
  for word in words:
    word = word.strip("\n")
    if len(word) > 1:  # A commit; the status of a file is one letter.
      commit_id = word.split()[0]
      found[commit_id] = []
    elif word:
      file = next(words)
      if word in _EXISTING and _counts(config, file):
        found[commit_id].append(file)
  return {commit: tuple(sorted(files)) for commit, files in found.items()}


def _counts(config: SWEConfig, file: str) -> bool:
  folder = config.under.strip("/") + "/" if config.under else ""
  return file.startswith(folder) and file.endswith(config.extensions)


@functools.lru_cache(maxsize=8)
def _tree_of(path: pathlib.Path, config: SWEConfig, commit: str) -> tuple[str, ...]:
  """Returns the relevant files of a commit's tree, sorted."""
  raw = _git(path, config, "ls-tree", "-r", "-z", "--name-only", commit)
  files = raw.decode(errors="replace").split("\0")
  tree = tuple(sorted(file for file in files if _counts(config, file)))
  if len(tree) > config.max_tree:
    raise ValueError(
      f"{path}: got {len(tree)} files in the tree of {commit[:12]}, expected at most max_tree ="
      f" {config.max_tree}; name a folder with SWEConfig.under, or raise it."
    )
  return tree


def _git(path: pathlib.Path, config: SWEConfig, *arguments: str, given: bytes = b"") -> bytes:
  """Returns the output of a git command; raises if it fails, or exceeds time or output limits."""
  return _output(path, [*_GIT, "-C", str(path), *arguments], config.timeout_seconds, given)


def _output(
  path: pathlib.Path, command: Sequence[str], timeout_seconds: float, given: bytes
) -> bytes:
  environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
  environment |= {
    "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C",
  }  # fmt: skip
  with tempfile.TemporaryFile() as questions, tempfile.TemporaryFile() as complaints:
    questions.write(given)
    questions.seek(0)
    try:
      process = subprocess.Popen(
        command, stdin=questions, stdout=subprocess.PIPE, stderr=complaints, env=environment
      )
    except FileNotFoundError as error:
      raise FileNotFoundError(
        f"{path}: got no {command[0]!r} on this machine, expected it on the PATH; install git."
      ) from error
    assert process.stdout is not None
    is_late = threading.Event()

    def end() -> None:
      is_late.set()
      process.kill()

    timer = threading.Timer(timeout_seconds, end)
    timer.start()
    try:
      written = process.stdout.read(MAX_BYTES + 1)
      if len(written) > MAX_BYTES:
        process.kill()
      code = process.wait()
    finally:
      timer.cancel()
      process.stdout.close()
    complaints.seek(0)
    complaint = complaints.read(400).decode(errors="replace").strip()
  what = " ".join(word for word in command[len(_GIT) + 2 : len(_GIT) + 3])
  if is_late.is_set():
    raise TimeoutError(
      f"{path}: 'git {what}' did not end in {timeout_seconds:g} seconds, expected less; raise"
      " SWEConfig.timeout_seconds, or lower max_commits."
    )
  if len(written) > MAX_BYTES:
    raise ValueError(
      f"{path}: got more than {MAX_BYTES >> 20} MiB from 'git {what}', expected less; lower"
      " SWEConfig.max_commits."
    )
  if code != 0:
    raise ValueError(
      f"{path}: got {complaint[:300]!r} from 'git {what}', expected a repository with commits that"
      " this user may read; correct the path, or see git's message."
    )
  return written
