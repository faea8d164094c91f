"""Settings for every test, made before the first import of JAX and of the library's packages.

Tests run on eight virtual CPU devices, so that meshes are real. Rank promotion raises everywhere.
Dtype promotion is strict in the folders of `STRICT` only, because optax needs the standard one.
jaxtyping and beartype check every annotation of the library while it is traced.
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

# These two modules change the context that JAX traces in. If a test were the first to import them,
# every program of the process would be traced again.
import jax.experimental.pallas
import jax.experimental.pallas.fuser
import jaxtyping
import pytest
import xdist.scheduler

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The hook stays for the whole session: it must see each module of the library on its first import.
IMPORT_HOOK = jaxtyping.install_import_hook(
  ["seerjax", "pallas_kernels"], "annotation_checker.checker"
)

TESTS = pathlib.Path(__file__).parent
# Folders in which every test is `thorough`: whole command runs and the scripts that launch them.
THOROUGH = ("commands", "experiments", "launch")
# Upper bound on the thorough tests of changed files in one run of launch/test.sh --all.
MAX_OF_CHANGES = 20
# Minimum share of the contract's files that run when SEERJAX_TEST_SHARE is smaller.
SHARE_OF_CONTRACT = 0.1
STRICT = ("contract", "engine", "kv", "models", "ops", "pallas_kernels")
# Folders and files that share programs or runs, which a single pytest process should make.
PROCESSES = {
  "contract": "engines", "engine": "engines", "kv": "engines", "rollout": "engines",
  "run": "runs", "test_rl.py": "runs", "experiments": "experiments",
  "commands": "experiments",
}  # fmt: skip

# No deadline, because compiling makes first examples slow. Examples are drawn afresh each time;
# launch/test.sh prints the seed that repeats them.
hypothesis.settings.register_profile("default", max_examples=20, deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", max_examples=500, deadline=None, print_blob=True)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
  """Adds the options that choose the tier and that continue an earlier session."""
  parser.addoption(
    "--everyday", action="store_true", help="nothing `thorough`, but in files that are named"
  )
  parser.addoption(
    "--whole", metavar="FILE,...", help="with --everyday: the files that count as named"
  )
  parser.addoption(
    "--concerned",
    metavar="PATH,...",
    help="files and folders of the thorough tests to draw first",
  )
  parser.addoption(
    "--finished", type=pathlib.Path, help="run no test that it names; those that pass enter it"
  )


def pytest_configure(config: pytest.Config) -> None:
  """Draws the session's seed once and sets a GPU's flags; worker processes inherit both."""
  # Imported after the hook is installed; on a CPU this call sets nothing.
  from seerjax import xla_flags

  xla_flags.pin(print)
  os.environ.setdefault("SEERJAX_TEST_SEED", str(secrets.randbelow(2**30)))
  if config.option.finished and not hasattr(config, "workerinput"):
    config.pluginmanager.register(Finished(config.option.finished))


class Finished:
  """Records each passed test and its reported events in a file as soon as the test ends."""

  def __init__(self, path: pathlib.Path):
    self._path = path

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
      events = [f"# {value}" for name, value in report.user_properties if name == "events"]
      with self._path.open("a") as file:
        file.write("".join(f"{line}\n" for line in (*events, report.nodeid)))


class ByFolder(xdist.scheduler.LoadScopeScheduling):
  """Assigns whole files to pytest's processes; files with one name in `PROCESSES` stay together.

  When only a share of the files is drawn, files are assigned singly: they have little in common
  except the programs on disk.
  """

  def _split_scope(self, nodeid: str) -> str:
    file = nodeid.partition("::")[0].removeprefix("tests/")
    if share_of_files() < 1:
      return file
    folder = file.rpartition("/")[0]
    return PROCESSES.get(folder) or PROCESSES.get(file, file)


def is_of_contract(path: pathlib.Path) -> bool:
  """Returns whether a test file belongs to the contract."""
  return path.parent == TESTS / "contract"


def share_of_files() -> float:
  """Returns the share of non-contract test files that this session runs; 1 runs every file."""
  return float(os.environ.get("SEERJAX_TEST_SHARE", "1"))


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> ByFolder:
  """Runs tests that share programs or runs in one process."""
  return ByFolder(config, log)


def name_of(item: pytest.Item) -> str:
  """Returns a test's node id without parameters, relative to the root of the repository."""
  return item.nodeid.partition("[")[0]


def is_thorough(item: pytest.Item) -> bool:
  """Returns whether a test runs only with launch/test.sh --all."""
  folder = item.path.relative_to(TESTS).parts[0]
  return folder in THOROUGH or item.get_closest_marker("thorough") is not None


def place_in_lottery(name: str, seed: str) -> float:
  """Returns a test's number in [0, 1) under a session's seed; a share takes the lowest numbers."""
  return random.Random(f"{seed} {name}").random()


def drawn_thorough_tests(
  names: Iterable[str], share: float, seed: str, concerned: Sequence[pathlib.Path] = ()
) -> dict[str, str]:
  """Returns the thorough tests that a session runs, and the reason for each.

  A share is drawn by the session's seed. At most `MAX_OF_CHANGES` more are drawn among the tests
  that a change concerns; tests of files named in `concerned` come before tests of its folders.

  Args:
    names: node ids without parameters; all parameter sets of a drawn test run.
    concerned: test files and folders, relative to the root of the repository.
  """
  in_order = sorted(names, key=lambda name: place_in_lottery(name, seed))
  drawn = {name: "lottery" for name in in_order if place_in_lottery(name, seed) < share}

  def nearness(name: str) -> int:
    file = pathlib.Path(name.partition("::")[0])
    return (file in concerned) + bool({file, *file.parents} & {*concerned})

  of_changes = [name for name in in_order if name not in drawn and nearness(name)]
  of_changes.sort(key=nearness, reverse=True)  # Stable: equally near tests keep the drawn order.
  return drawn | dict.fromkeys(of_changes[:MAX_OF_CHANGES], "of what changed")


def share_of_thorough() -> float:
  """Returns the share of the thorough tests that this session draws."""
  return float(os.environ.get("SEERJAX_TEST_SHARE_OF_THOROUGH", "1"))


def named_paths(config: pytest.Config) -> set[pathlib.Path]:
  """Returns the paths that `--everyday` runs whole: those of `--whole`, else all arguments."""
  whole = config.args if config.option.whole is None else config.option.whole.split(",")
  return {(config.invocation_params.dir / name).resolve() for name in whole}


def concerned_paths(config: pytest.Config) -> list[pathlib.Path]:
  """Returns the paths of `--concerned`."""
  return [pathlib.Path(name) for name in (config.option.concerned or "").split(",") if name]


@functools.cache
def files_of_share(share: float, seed: str, ignored: frozenset[pathlib.Path]) -> set[pathlib.Path]:
  """Returns the test files of a session that runs a share of them, drawn by its seed."""
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
  """Skips files without a selected test, since importing all files takes a minute.

  Skipped are files outside the drawn share and, in the folders `THOROUGH`, files without a drawn
  test; with `--everyday` every file of these folders that is not named.
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
  """Draws the parameters of tests marked `few`; parameter sets not drawn count as long.

  Parameter sets marked `few(n, of="kind")` are drawn among those of their kind, identically in all
  tests of a file. With `-m long` all count as long. Tests listed by `--finished` are left out. With
  `--everyday` one parameter set of a test marked `few` runs, and `thorough` tests run only in files
  that are named: all arguments, or those of `--whole`.

  SEERJAX_TEST_SHARE below 1 draws that share of the files before they are imported, at least
  `SHARE_OF_CONTRACT` of the contract's files, and one parameter set of each contract test.
  SEERJAX_TEST_SHARE_OF_THOROUGH below 1 draws thorough tests (`drawn_thorough_tests`).
  """
  if config.option.everyday:
    named = named_paths(config)
    # In a drawn share the contract's files run whole, because their portable path is thorough.
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
    # All tests of a file draw the same parameters of a kind, and share what they compile.
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
  """Freezes the objects so far and collects garbage seldom: collection took 10% of the time."""
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
  """Prints the events of the fuzz tests, the seconds by file and, after a failure, the seed."""
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
  """Prints how long the tests of each file took, fixtures included, slowest first."""
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
  """Prints the drawn thorough tests and the reason for each."""
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
  """A fresh seed of this session, in [0, 2**30), equal in all processes of pytest."""
  return int(os.environ["SEERJAX_TEST_SEED"])


@pytest.fixture
def tell_events(record_property) -> Callable[[str, Mapping[str, int], Sequence[str]], None]:
  """Prints at the session's end how often each event happened; an event with count 0 fails."""

  def tell(name: str, events: Mapping[str, int], expected: Sequence[str]) -> None:
    counts = ", ".join(f"{event} {count}" for event, count in sorted(events.items()))
    record_property("events", f"{name}: {counts}")
    missing = [event for event in expected if not events.get(event)]
    assert not missing, f"{name}: got no {missing}, expected each at least once; change the draws"

  return tell


@pytest.fixture(scope="session")
def programs_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Returns the session's folder for compiled programs, shared by all its processes."""
  folder = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    folder = folder.parent  # The session's folder; each process has a subfolder.
  return folder / "programs"


@pytest.fixture(scope="module")
def programs_on_disk(programs_folder: pathlib.Path) -> Iterator[None]:
  """Keeps compiled programs on disk, for files with tests that would each compile them."""
  if jax.config.jax_compilation_cache_dir:
    yield  # The whole session already keeps them.
    return
  kept = {
    "jax_compilation_cache_dir": str(programs_folder),
    "jax_persistent_cache_min_compile_time_secs": 0.2,
    # With a size limit, processes take turns at an entry.
    "jax_compilation_cache_max_size": 4 << 30,
  }
  before = {name: jax.config.values[name] for name in kept}
  for name, value in kept.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()  # Else the cache stays as configured at the first compilation.
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
  """Drops programs that tests cache, once the process is near the kernel's limit on memory maps.

  A compiled program takes several maps, and a process that reaches the limit dies in LLVM. Tests
  share programs in caches of functions. JAX's own caches are kept: an engine's program must not be
  traced a second time.
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
  """Returns how many memory ranges this process has mapped; 0 where Linux does not report it."""
  maps = pathlib.Path("/proc/self/maps")
  return maps.read_bytes().count(b"\n") if maps.exists() else 0


def max_num_maps() -> int:
  """Returns how many memory ranges Linux lets a process map."""
  bound = pathlib.Path("/proc/sys/vm/max_map_count")
  return int(bound.read_text()) if bound.exists() else 65_530


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
  """Disables annotation checks around one test, for errors of the library that they forestall."""
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
