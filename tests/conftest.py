"""Settings that hold for every test. They come before the first import of JAX and of our packages.

Eight virtual CPU devices, so that meshes are real. Rank promotion raises, everywhere; dtype
promotion is strict in the folders of `STRICT` (and not elsewhere, because optax needs the standard
one). jaxtyping and beartype check every annotation of ours while it traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import gc
import os
import pathlib
import random
import re
import secrets
import sys

os.environ["JAX_PLATFORMS"] = os.environ.get("SEERJAX_TEST_PLATFORMS", "cpu")

import annotation_checker
import hypothesis
import jax
from jax.experimental.compilation_cache import compilation_cache

# These two add to the context that JAX traces in: imported by whichever test is the first to need
# them, they would have every program of the process traced once more.
import jax.experimental.pallas
import jax.experimental.pallas.fuser
import jaxtyping
import pytest
import xdist.scheduler

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The hook stays for the whole session: it must see each of our modules when it is first imported.
IMPORT_HOOK = jaxtyping.install_import_hook(
  ["seerjax", "pallas_kernels"], "annotation_checker.checker"
)

TESTS = pathlib.Path(__file__).parent
# Folders whose tests are all `thorough`: whole runs of commands, and what launches them.
THOROUGH = ("experiments", "launch")
# Thorough tests of what changed that run with launch/test.sh --all, however much changed.
MAX_OF_CHANGES = 20
# Of the contract's files, where SEERJAX_TEST_SHARE draws less of the others.
SHARE_OF_CONTRACT = 0.1
STRICT = ("contract", "engine", "models", "ops", "pallas_kernels")
# Folders and files that share programs, or runs, which one process of pytest should make alone.
PROCESSES = {
  "contract": "engines", "engine": "engines", "engine/kv": "engines", "rollout": "engines",
  "run": "runs", "test_rl.py": "runs", "experiments": "experiments",
}  # fmt: skip

# Compiling makes first examples slow, so no deadline. Examples are drawn afresh each time:
# launch/test.sh prints the seed that repeats them.
hypothesis.settings.register_profile("default", max_examples=20, deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", max_examples=500, deadline=None, print_blob=True)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
  """Chooses the tier, and the file by which a session of hours continues an earlier one."""
  parser.addoption(
    "--everyday", action="store_true", help="nothing `thorough`, but in files that are named"
  )
  parser.addoption(
    "--whole", metavar="FILE,...", help="with --everyday: the files that count as named"
  )
  parser.addoption(
    "--concerned", metavar="PATH,...", help="files and folders whose thorough tests are drawn first"
  )
  parser.addoption(
    "--finished", type=pathlib.Path, help="run no test that it names; those that pass enter it"
  )


def pytest_configure(config: pytest.Config) -> None:
  """Draws the session's seed once and sets a GPU's flags; worker processes inherit both."""
  # Imported here, behind the hook; on a CPU it sets nothing.
  from seerjax import xla_flags

  xla_flags.pin(print)
  os.environ.setdefault("SEERJAX_TEST_SEED", str(secrets.randbelow(2**30)))
  if config.option.finished and not hasattr(config, "workerinput"):
    config.pluginmanager.register(Finished(config.option.finished))


class Finished:
  """Writes down each test that passes, and the events that it told of, as soon as it is known."""

  def __init__(self, path: pathlib.Path):
    self._path = path

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
      events = [f"# {value}" for name, value in report.user_properties if name == "events"]
      with self._path.open("a") as file:
        file.write("".join(f"{line}\n" for line in (*events, report.nodeid)))


class ByFolder(xdist.scheduler.LoadScopeScheduling):
  """Deals whole files to pytest's processes, and what `PROCESSES` says as if it were one file.

  Where a share of the files is drawn, little is left to share but what the disk keeps.
  """

  def _split_scope(self, nodeid: str) -> str:
    file = nodeid.partition("::")[0].removeprefix("tests/")
    if share_of_files() < 1:
      return file
    folder = file.rpartition("/")[0]
    return PROCESSES.get(folder) or PROCESSES.get(file, file)


def is_of_contract(path: pathlib.Path) -> bool:
  """Returns whether a file of tests is of the contract."""
  return path.parent == TESTS / "contract"


def share_of_files() -> float:
  """Returns which share of the files besides the contract's this session runs; 1 is all of both."""
  return float(os.environ.get("SEERJAX_TEST_SHARE", "1"))


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> ByFolder:
  """Has tests that share programs or runs in one process."""
  return ByFolder(config, log)


def name_of(item: pytest.Item) -> str:
  """Returns a test's name without its parameters, with its file from the root of the repository."""
  return item.nodeid.partition("[")[0]


def is_thorough(item: pytest.Item) -> bool:
  """Returns whether a test runs with launch/test.sh --all alone."""
  folder = item.path.relative_to(TESTS).parts[0]
  return folder in THOROUGH or item.get_closest_marker("thorough") is not None


def place_in_lottery(name: str, seed: str) -> float:
  """Returns where a test's name lies in [0, 1) by a session's seed; a share takes the lowest."""
  return random.Random(f"{seed} {name}").random()


def drawn_thorough_tests(
  names: Iterable[str], share: float, seed: str, concerned: Sequence[pathlib.Path] = ()
) -> dict[str, str]:
  """Returns which thorough tests a session runs, and why: a share drawn by its seed, and others.

  The others are of files and folders that a change concerns, at most `MAX_OF_CHANGES`, drawn
  likewise, those of files that are named before those of folders.

  Args:
    names: of tests as nodeids without parameters; a test runs with all of them, or not.
    concerned: files and folders of tests, from the root of the repository.
  """
  in_order = sorted(names, key=lambda name: place_in_lottery(name, seed))
  drawn = {name: "lottery" for name in in_order if place_in_lottery(name, seed) < share}

  def nearness(name: str) -> int:
    file = pathlib.Path(name.partition("::")[0])
    return (file in concerned) + bool({file, *file.parents} & {*concerned})

  of_changes = [name for name in in_order if name not in drawn and nearness(name)]
  of_changes.sort(key=nearness, reverse=True)  # Stable: by lottery among the equally near.
  return drawn | dict.fromkeys(of_changes[:MAX_OF_CHANGES], "of what changed")


def share_of_thorough() -> float:
  """Returns which share of the thorough tests this session draws."""
  return float(os.environ.get("SEERJAX_TEST_SHARE_OF_THOROUGH", "1"))


def named_paths(config: pytest.Config) -> set[pathlib.Path]:
  """Returns what counts as named with `--everyday`: all arguments, or those of `--whole`."""
  whole = config.args if config.option.whole is None else config.option.whole.split(",")
  return {(config.invocation_params.dir / name).resolve() for name in whole}


def concerned_paths(config: pytest.Config) -> list[pathlib.Path]:
  """Returns what `--concerned` names."""
  return [pathlib.Path(name) for name in (config.option.concerned or "").split(",") if name]


@functools.cache
def files_of_share(share: float, seed: str, ignored: frozenset[pathlib.Path]) -> set[pathlib.Path]:
  """Returns the files of tests that a session runs which draws a share of them, by its seed."""
  everything = [
    path for path in sorted(TESTS.rglob("test_*.py")) if not ignored & {path, *path.parents}
  ]
  draw = random.Random(f"{seed} files")
  found = set()
  for is_contract in (False, True):
    files = [path for path in everything if is_of_contract(path) == is_contract]
    drawn = max(share, SHARE_OF_CONTRACT) if is_contract else share
    found |= {*draw.sample(files, round(drawn * len(files)))}
  return found


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
  """Leaves out files of which nothing runs: to import all of them takes a minute.

  Those are files that a share does not draw, and of the folders `THOROUGH` those of which no test
  is drawn, every day those that are not named.
  """
  if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
    return None
  seed = os.environ["SEERJAX_TEST_SEED"]
  if share_of_files() < 1:
    ignored = frozenset(pathlib.Path(name).resolve() for name in config.getoption("ignore") or ())
    if collection_path not in files_of_share(share_of_files(), seed, ignored):
      return True
  if collection_path.relative_to(TESTS).parts[0] not in THOROUGH:
    return None
  if config.option.everyday:
    return collection_path not in named_paths(config) or None
  file = collection_path.relative_to(TESTS.parent)
  if share_of_thorough() >= 1 or {*concerned_paths(config)} & {file, *file.parents}:
    return None
  names = re.findall(r"^def (test_\w+)", collection_path.read_text(), re.MULTILINE)
  places = [place_in_lottery(f"{file.as_posix()}::{name}", seed) for name in names]
  return min(places, default=1) >= share_of_thorough() or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  """Draws the parameters of tests marked `few`; those that are not drawn count as long.

  Parameter sets marked `few(n, of="kind")` are drawn among those of their kind, in all tests of a
  file alike. With `-m long` all count as long. What `--finished` names is left out. With
  `--everyday` one parameter set of a test marked `few` runs, and of what is `thorough` the files
  that are named: all that are arguments, or those of `--whole`.

  SEERJAX_TEST_SHARE below 1 draws that share of the files before they are imported, of the
  contract's files `SHARE_OF_CONTRACT` or more, and of a test of the contract one of its parameters.
  SEERJAX_TEST_SHARE_OF_THOROUGH below 1 draws thorough tests (`drawn_thorough_tests`).
  """
  if config.option.everyday:
    named = named_paths(config)
    # Where a share of the files is drawn, the contract's are whole: its portable path is thorough.
    is_whole = lambda path: path in named or (share_of_files() < 1 and is_of_contract(path))
    dear = {item for item in items if is_thorough(item) and not is_whole(item.path)}
    config.hook.pytest_deselected(items=[*dear])
    items[:] = [item for item in items if item not in dear]
  share = share_of_files()
  thorough = [
    item for item in items if is_thorough(item) and item.get_closest_marker("long") is None
  ]
  drawn = drawn_thorough_tests(
    {name_of(item) for item in thorough},
    share_of_thorough(),
    os.environ["SEERJAX_TEST_SEED"],
    concerned_paths(config),
  )
  if share_of_thorough() < 1:
    for item in thorough:
      item.user_properties.append(("drawn", drawn.get(name_of(item))))
    absent = {item for item in thorough if name_of(item) not in drawn}
    config.hook.pytest_deselected(items=[*absent])
    items[:] = [item for item in items if item not in absent]
  variants: dict[tuple[str, str], list[pytest.Item]] = {}
  for item in items:
    few = item.get_closest_marker("few")
    of_contract = share < 1 and is_of_contract(item.path)
    if (few or of_contract) and not item.get_closest_marker("long"):
      kind = few.kwargs.get("of", "") if few and not of_contract else ""
      variants.setdefault((name_of(item), kind), []).append(item)
  for (name, kind), several in variants.items():
    # Tests of a file that draw of one kind draw alike, and share what they compile.
    place = f"{several[0].path.name} {kind}" if kind else name
    draw = random.Random(f"{os.environ['SEERJAX_TEST_SEED']} {place}")
    few = several[0].get_closest_marker("few")
    num_drawn = 1 if few is None or config.option.everyday else few.args[0]
    if config.option.markexpr == "long":
      num_drawn = 0
    for item in draw.sample(several, max(len(several) - num_drawn, 0)):
      item.add_marker(pytest.mark.long)
  path = config.option.finished
  if path and path.is_file():
    finished = {*path.read_text().splitlines()}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in finished])
    items[:] = [item for item in items if item.nodeid not in finished]


def pytest_collection_finish(session: pytest.Session) -> None:
  """Has the garbage collector look at what tests make, and seldom: it took a tenth of all time."""
  gc.collect()
  gc.freeze()
  gc.set_threshold(20_000, 20, 50)


def pytest_report_header(config: pytest.Config) -> str:
  unchecked = "" if annotation_checker.HAS_BEARTYPE else "; annotations unchecked: no beartype"
  return (
    f"seerjax: JAX {jax.__version__}, SEERJAX_TEST_SEED={os.environ['SEERJAX_TEST_SEED']}"
    f" (set it to repeat this session){unchecked}"
  )


def pytest_terminal_summary(terminalreporter, exitstatus: int) -> None:
  """Prints what the fuzz tests met, seconds by file, and the seed again if something failed."""
  tell_seconds_by_file(terminalreporter)
  tell_drawn(terminalreporter)
  for outcome in ("passed", "failed"):
    for report in terminalreporter.stats.get(outcome, []):
      for name, value in report.user_properties:
        if name == "events":
          terminalreporter.write_line(value)
  if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
    terminalreporter.write_line(
      f"SEERJAX_TEST_SEED={os.environ['SEERJAX_TEST_SEED']} repeats this session"
    )


def tell_seconds_by_file(terminalreporter) -> None:
  """Prints how long the tests of each file took, fixtures included; the dearest first."""
  seconds: dict[str, float] = {}
  for reports in terminalreporter.stats.values():
    for report in reports:
      if isinstance(report, pytest.TestReport):
        file = report.nodeid.partition("::")[0]
        seconds[file] = seconds.get(file, 0.0) + report.duration
  dear = sorted((item for item in seconds.items() if item[1] >= 1), key=lambda item: -item[1])
  if len(seconds) > 1:
    terminalreporter.write_line(f"seconds by file, {sum(seconds.values()):.0f} in all:")
    for file, one in dear:
      terminalreporter.write_line(f"  {one:6.1f}  {file}")


def tell_drawn(terminalreporter) -> None:
  """Prints which thorough tests were drawn, and why."""
  drawn: dict[str, set[str]] = {}
  for reports in terminalreporter.stats.values():
    for report in reports:
      if isinstance(report, pytest.TestReport):
        for name, why in report.user_properties:
          if name == "drawn":
            drawn.setdefault(str(why), set()).add(report.nodeid.partition("[")[0])
  for why, names in sorted(drawn.items()):
    terminalreporter.write_line(f"thorough tests drawn, {why}: {len(names)}")
    for name in sorted(names):
      terminalreporter.write_line(f"  {name}")


@pytest.fixture(scope="session")
def seed() -> int:
  """A fresh seed of this session, in [0, 2**30); equal in all processes of pytest."""
  return int(os.environ["SEERJAX_TEST_SEED"])


@pytest.fixture
def tell_events(record_property) -> Callable[[str, Mapping[str, int], Sequence[str]], None]:
  """Prints at the session's end how often each event happened; one that never did is a failure."""

  def tell(name: str, events: Mapping[str, int], expected: Sequence[str]) -> None:
    counts = ", ".join(f"{event} {count}" for event, count in sorted(events.items()))
    record_property("events", f"{name}: {counts}")
    missing = [event for event in expected if not events.get(event)]
    assert not missing, f"{name}: got no {missing}, expected each at least once; change the draws"

  return tell


@pytest.fixture(scope="session")
def programs_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Takes the compiled programs of this session, all its processes, of the files that keep them."""
  folder = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    folder = folder.parent  # Of the session; a process has one within it.
  return folder / "programs"


@pytest.fixture(scope="module")
def programs_on_disk(programs_folder: pathlib.Path) -> Iterator[None]:
  """Keeps compiled programs on disk for a file's tests: for runs that each make theirs anew."""
  if jax.config.jax_compilation_cache_dir:
    yield  # The whole session keeps them.
    return
  kept = {
    "jax_compilation_cache_dir": str(programs_folder),
    "jax_persistent_cache_min_compile_time_secs": 0.2,
    # With a bound, processes take turns at an entry.
    "jax_compilation_cache_max_size": 4 << 30,
  }
  before = {name: jax.config.values[name] for name in kept}
  for name, value in kept.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()  # Else a process stays with what it chose when it first compiled.
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
  """Lets programs that tests keep go, after a file that brought its process near the bound on maps.

  A compiled program takes some, and a process that reaches the kernel's bound dies in LLVM. What
  tests share is in caches of functions. JAX's own stay: an engine's program that was traced once
  may not be traced again.
  """
  yield
  if num_maps() > max_num_maps() // 3:
    for module in [*sys.modules.values()]:
      if str(TESTS) in (getattr(module, "__file__", None) or ""):
        for value in vars(module).values():
          if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
    gc.collect()


def num_maps() -> int:
  """Returns how many ranges of memory this process has mapped; 0 where Linux does not say."""
  maps = pathlib.Path("/proc/self/maps")
  return maps.read_bytes().count(b"\n") if maps.exists() else 0


def max_num_maps() -> int:
  """Returns how many ranges of memory Linux lets a process map."""
  bound = pathlib.Path("/proc/sys/vm/max_map_count")
  return int(bound.read_text()) if bound.exists() else 65_530


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
  """No check of annotations around one test: for a refusal of ours that the check forestalls."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def strict_promotion() -> Iterator[None]:
  """Strict dtype promotion around one test, for folders that are not strict as a whole."""
  with jax.numpy_dtype_promotion("strict"):
    yield


@pytest.fixture(autouse=True)
def promotion_of_the_folder(request: pytest.FixtureRequest) -> Iterator[None]:
  """Strict dtype promotion where `STRICT` says so; `@pytest.mark.standard_promotion` opts out."""
  folder = request.path.relative_to(TESTS).parts[0]
  opted_out = request.node.get_closest_marker("standard_promotion") is not None
  mode = "strict" if folder in STRICT and not opted_out else "standard"
  if "strict_promotion" in request.fixturenames:
    mode = "strict"
  with jax.numpy_dtype_promotion(mode):
    yield
