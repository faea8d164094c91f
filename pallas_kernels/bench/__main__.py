"""Checks the kernels on a GPU, then times them and other implementations of the same functions.

    python -m pallas_kernels.bench [--out=DIR] [--only=matmul,attention] [--seconds=450]
    python -m pallas_kernels.bench --dry_run
    python -m pallas_kernels.bench --question=wgmma_width

It first measures the machine's copy bandwidth and matmul rate, then checks agreement with the
definitions and the invariance of every row's bits, then prints the table. The speed of a kernel
that failed a check is not shown. `--seconds` is divided among the parts: checks come first, and
cases that no longer fit are listed as left out. `DIR` receives bench.json and bench.md, updated
after every part. The exit status is 1 if anything failed; a missed target is not a failure.

`--dry_run` does the same on a CPU: tiny checks in the interpreter (JAX 0.11.1 or later), and every
shape is lowered for an H200 instead of timed.

`timing.py` has the timing, `cases.py` the timed cases, `checks.py` the checks of all kernels,
`questions.py` open questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

from absl import app, flags
import jax

from pallas_kernels import gpu
from pallas_kernels.bench import (
  cases as cases_lib,
  check_sizes,
  checks as checks_lib,
  questions as questions_lib,
)
from pallas_kernels.bench.cases import COPY, PEAK, Case
from pallas_kernels.bench.comparison import Check
from pallas_kernels.bench.timing import (
  Machine,
  Timing,
  measure_machine,
  race,
  reason_of,
  shapes_of,
)

# Maximum share of the seconds for checks.
CHECKS_SHARE = 0.5
# Approximate minimum time of a case, including compilation.
CASE_SECONDS = 3.0
# Kinds of check: a failure of the first hides a kernel's speed, one of the second fails the run.
REFUSING = ("agreement", "invariance")
FAILING = (*REFUSING, "claim")
DRY_RUN = "dry run: nothing here was measured"
LOWERS = "lowers for an H200"

OUT = flags.DEFINE_string("out", "runs/bench", "Output directory for bench.json and bench.md.")
ONLY = flags.DEFINE_list("only", [], "Kernels to run; all if empty.")
IS_DRY = flags.DEFINE_bool(
  "dry_run", False, "Whether to interpret and lower on a CPU, without timing."
)
IS_SMALL = flags.DEFINE_bool(
  "small", False, "Whether to run only tiny checks on the GPU, for sanitizers."
)
TINY_CHECKS = flags.DEFINE_bool(
  "tiny_checks", False, "Whether to run tiny checks before full-sized cases."
)
MODELS = flags.DEFINE_list("models", [], "Models to take cases from; all if empty.")
CHECKS_ONLY = flags.DEFINE_bool(
  "checks_only", False, "Whether to run only the checks, without timing."
)
SECONDS = flags.DEFINE_float(
  "seconds", 450.0, "Total time budget of checks and cases.", lower_bound=1.0
)
QUESTION = flags.DEFINE_string("question", "", "Open question to answer, or 'all'.")
COMMIT = flags.DEFINE_string("commit", "", "Commit of these sources; taken from git if empty.")


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table.

  Attributes:
    kernel: the kernel.
    name: name of the case.
    timings: the kernel's timing first, then its peers'; empty if refused or left out.
    copy_share: time of a copy of the necessary bytes / time of the kernel.
    peak_share: the kernel's rate / the best measured matmul rate.
    bar: the target as text.
    verdict: "met", "not met", "refused", "left out", "failed", "not measured", or "" without a bar.
    note: reason if refused or failed.
  """

  kernel: str
  name: str
  timings: tuple[Timing, ...] = ()
  copy_share: float = 0.0
  peak_share: float = 0.0
  bar: str = ""
  verdict: str = ""
  note: str = ""


@dataclasses.dataclass
class Report:
  """The results of a run, updated as it progresses."""

  header: Mapping[str, str]
  machine: Machine | None = None
  checks: list[Check] = dataclasses.field(default_factory=list)
  rows: list[Row] = dataclasses.field(default_factory=list)
  answers: list[questions_lib.Answer] = dataclasses.field(default_factory=list)
  left_out: list[str] = dataclasses.field(default_factory=list)
  failures: list[str] = dataclasses.field(default_factory=list)

  def write(self, directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    record = dataclasses.asdict(self)
    (directory / "bench.json").write_text(json.dumps(record, indent=2) + "\n")
    (directory / "bench.md").write_text(markdown(self))


def main(arguments: Sequence[str]) -> None:
  if len(arguments) > 1:
    raise app.UsageError(f"got {arguments[1]!r}, expected flags only.")
  # Leaves GPU memory for PyTorch, and prevents XLA from using Triton instead of cuBLAS.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  own_flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{own_flags} --xla_gpu_enable_triton_gemm=false".strip()
  is_dry = IS_DRY.value
  small = is_dry or IS_SMALL.value
  sizes = check_sizes.TINY if small or TINY_CHECKS.value else check_sizes.FULL
  sizes = dataclasses.replace(sizes, interpret=is_dry)
  reason = gpu.device_reason(interpret=is_dry)
  if reason is not None:
    advice = "" if is_dry else " --dry_run needs no GPU."
    raise app.UsageError(f"the kernels cannot run here: {reason}.{advice}")
  report = Report(header(COMMIT.value, is_dry))
  directory = pathlib.Path(OUT.value)
  if QUESTION.value:
    questions = chosen_questions(QUESTION.value)
    report.machine = None if is_dry else measure_machine()
    answer_questions(report, questions, questions_lib.Setting(sizes, report.machine), directory)
  else:
    checks = checks_lib.kernel_checks(sizes)
    kernels = named(ONLY.value, tuple(checks), "--only")
    cases = [] if IS_SMALL.value or CHECKS_ONLY.value else list(cases_lib.cases())
    models = named(MODELS.value, [model.name for model in cases_lib.MODELS], "--models")
    cases = [c for c in cases if c.kernel in kernels and c.name.startswith(models)]
    bench(report, {name: checks[name] for name in kernels}, cases, SECONDS.value, directory)
  report.write(directory)
  print(markdown(report))
  print(f"written: {directory / 'bench.json'}, {directory / 'bench.md'}")
  if report.failures:
    sys.exit(1)


def bench(
  report: Report,
  checks: Mapping[str, Iterable[Check]],
  cases: Sequence[Case],
  seconds: float,
  directory: pathlib.Path,
  clock: Callable[[], float] = time.monotonic,
) -> None:
  """Runs checks, then times or lowers cases, and writes `report` as it grows."""
  end = clock() + seconds
  is_dry = bool(report.header["dry_run"])
  if not is_dry and cases:
    report.machine = measure_machine()
  # A dry run has no time limit.
  limit = float("inf") if is_dry else seconds * (CHECKS_SHARE if cases else 1)
  check(report, checks, limit, clock, lambda: report.write(directory))
  refusals = {name: refusal(name, report.checks) for name in checks}
  seen: set[str] = set()
  longest = CASE_SECONDS
  for i, case in enumerate(cases):
    started = clock()
    if refusals[case.kernel]:
      row = Row(case.kernel, case.name, verdict="refused", note=refusals[case.kernel])
    elif report.machine is None:
      row = lowered(case, seen)
    elif (share := case_seconds(end - started, len(cases) - i, longest)) == 0:
      row = Row(case.kernel, case.name, bar=bar_text(case), verdict="left out", note="no time left")
      report.left_out.append(case.name)
    else:
      row = timed(case, report.machine, share)
      longest = max(longest, clock() - started)
      print(line_of(row), flush=True)
    if row.verdict == "failed":
      report.failures.append(f"{case.name}: {row.note}")
    report.rows.append(row)
    report.write(directory)


def check(
  report: Report,
  checks: Mapping[str, Iterable[Check]],
  seconds: float,
  clock: Callable[[], float] = time.monotonic,
  save: Callable[[], None] = lambda: None,
) -> None:
  """Runs checks into `report`. Each kernel has a share of the seconds, plus unused time of others.

  `save` is called after each check, because a kernel may hang and the process may be killed.
  """
  end = clock() + seconds
  for i, (kernel, of_kernel) in enumerate(checks.items()):
    own_end = clock() + (end - clock()) / (len(checks) - i)
    try:
      for done in of_kernel:
        report.checks.append(done)
        save()
        print(
          f"{'ok' if done.passed else 'FAILED':6} {kernel}: {done.what}: {done.seen}", flush=True
        )
        if clock() > own_end:
          report.left_out.append(f"{kernel}: the checks after '{done.what}'")
          break
    # An exception is a failure of the kernel; the others continue.
    except Exception as error:
      report.checks.append(Check(kernel, "agreement", "runs", False, reason_of(error)))
  report.failures += [
    f"{done.kernel}: {done.what}: {done.seen}"
    for done in report.checks
    if not done.passed and done.kind in FAILING
  ]


def refusal(kernel: str, checks: Iterable[Check]) -> str:
  """Returns why a kernel's speed is not shown; "" if it is."""
  own = [done for done in checks if done.kernel == kernel and done.kind in REFUSING]
  for done in own:
    if not done.passed:
      return f"{done.kind} fails: {done.what}: {done.seen}"
  missing = [kind for kind in REFUSING if all(done.kind != kind for done in own)]
  return f"no check of {' and '.join(missing)} was made" if missing else ""


def case_seconds(remaining: float, num_left: int, longest: float) -> float:
  """Returns the seconds of the next of `num_left` cases; 0 if the longest so far would not fit."""
  return max(remaining / num_left, 0.5) if remaining >= longest else 0.0


def timed(case: Case, machine: Machine, seconds: float) -> Row:
  """Times a case and its peers."""
  expected = case.expected_seconds(machine.copy_bandwidth, machine.matmul_peak)
  timings = race((case.ours, *case.peers), case.num_bytes, expected, seconds)
  return judged(case, timings, machine)


def lowered(case: Case, seen: set[str]) -> Row:
  """Lowers a case for an H200, and each kind of JAX peer once."""
  timings = []
  for contestant in (case.ours, *case.peers):
    reason = LOWERS
    if contestant.is_torch or (contestant is not case.ours and contestant.name in seen):
      continue
    seen.add(contestant.name)
    try:
      gpu.lower_for_cuda(contestant.call, *shapes_of(contestant.inputs))
    # A peer's error is only recorded.
    except Exception as error:
      reason = f"does not lower: {reason_of(error)}"
      if contestant is case.ours:
        return Row(case.kernel, case.name, verdict="failed", note=reason)
    timings.append(Timing(contestant.name, reason=reason))
  verdict = "not measured" if case.bar else ""
  return Row(case.kernel, case.name, tuple(timings), bar=bar_text(case), verdict=verdict)


def judged(case: Case, timings: Sequence[Timing], machine: Machine) -> Row:
  """Returns the row of a timed case."""
  ours, *peers = timings
  if ours.reason:
    return Row(case.kernel, case.name, tuple(timings), verdict="failed", note=ours.reason)
  copy_share = case.num_bytes / machine.copy_bandwidth / ours.median
  peak_share = case.num_operations / machine.matmul_peak / ours.median
  verdict = ""
  if case.bar is not None:
    ratios = {peer.name: peer.median / ours.median for peer in peers if not peer.reason}
    measured = {COPY: copy_share, PEAK: peak_share, **ratios}
    if case.bar.measure not in measured:
      verdict = "not measured"
    else:
      verdict = "met" if measured[case.bar.measure] >= case.bar.least else "not met"
  return Row(
    case.kernel, case.name, tuple(timings), copy_share, peak_share, bar_text(case), verdict
  )


def answer_questions(
  report: Report,
  questions: Iterable[Callable[[questions_lib.Setting], questions_lib.Answer]],
  setting: questions_lib.Setting,
  directory: pathlib.Path,
) -> None:
  """Runs all questions; an exception is recorded as a failure, and the others continue."""
  for question in questions:
    name = question.__name__
    try:
      answer = questions_lib.ask(question, setting)
      report.answers.append(answer)
      print(f"{name}: {answer.seen}", flush=True)
    except Exception as error:
      report.failures.append(f"{name}: {reason_of(error)}")
    report.write(directory)


def named(names: Sequence[str], known: Sequence[str], flag: str) -> tuple[str, ...]:
  """Returns the names given by a flag, or all known names if it is empty."""
  for name in names:
    if name not in known:
      raise app.UsageError(f"{flag}: got {name!r}, expected some of {', '.join(known)}.")
  return tuple(names or known)


def chosen_questions(
  name: str,
) -> tuple[Callable[[questions_lib.Setting], questions_lib.Answer], ...]:
  """Returns the question named by `--question`, or all of them."""
  known = {question.__name__: question for question in questions_lib.QUESTIONS}
  if name == "all":
    return questions_lib.QUESTIONS
  if name not in known:
    raise app.UsageError(f"--question: got {name!r}, expected one of all, {', '.join(known)}.")
  return (known[name],)


# ----- reports


def output_of(*command: str) -> str:
  """Returns the output of a command; "" if it does not exist or fails."""
  try:
    done = subprocess.run(
      command,
      cwd=pathlib.Path(__file__).parents[2],
      capture_output=True,
      text=True,
      check=True,
      timeout=30,
    )
  except (OSError, subprocess.SubprocessError):
    return ""
  return done.stdout.strip()


def header(commit: str, is_dry: bool) -> dict[str, str]:
  """Returns machine, versions and date of this run as text."""
  if not commit:
    commit = output_of("git", "rev-parse", "--short", "HEAD") or "unknown commit"
    if output_of("git", "status", "--porcelain"):
      commit += " with uncommitted changes"
  driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
  return {
    "dry_run": DRY_RUN if is_dry else "",
    "date": datetime.date.today().isoformat(),
    "commit": commit,
    "device": jax.devices()[0].device_kind,
    "driver": driver.splitlines()[0] if driver else "no NVIDIA driver",
    "python": platform.python_version(),
    "jax": jax.__version__,
    "command": " ".join(["python -m pallas_kernels.bench", *sys.argv[1:]]),
  }


def bar_text(case: Case) -> str:
  """Returns a case's target as text; "" without one."""
  if case.bar is None:
    return ""
  if case.bar.measure == cases_lib.ONE_TOKEN:
    return f"at most {1 / case.bar.least:.2f} times one token"
  names = {COPY: "of copy bandwidth", PEAK: "of matmul peak"}
  return (
    f"at least {percent(case.bar.least)} {names.get(case.bar.measure, f'of {case.bar.measure}')}"
  )


def percent(share: float) -> str:
  return f"{100 * share:.0f} %"


def microseconds(timing: Timing) -> str:
  return f"{timing.median * 1e6:,.1f} ({timing.least * 1e6:,.1f} to {timing.most * 1e6:,.1f})"


def line_of(row: Row) -> str:
  """Returns a row as one line of plain text."""
  return "  ".join([row.name, *cells(row)])


def cells(row: Row) -> list[str]:
  """Returns the cells of a row: time, shares, peers, target and verdict."""
  if not row.timings or row.note:
    return ["", "", "", row.note, row.bar, row.verdict]
  ours, *peers = row.timings
  if ours.reason:
    others = [f"{peer.name}: {peer.reason}" for peer in peers]
    return ["", "", "", "; ".join([ours.reason, *others]), row.bar, row.verdict]
  compared = [
    f"{peer.name}: {peer.reason}"
    if peer.reason
    else f"{peer.name} {microseconds(peer)}, {peer.median / ours.median:.2f}x"
    for peer in peers
  ]
  shares = [percent(row.copy_share), percent(row.peak_share)]
  return [microseconds(ours), *shares, "; ".join(compared), row.bar, row.verdict]


def table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
  """Returns a Markdown table; vertical bars within cells are replaced."""
  written = [[cell.replace("|", "/") for cell in line] for line in lines]
  rows = [list(names), ["---"] * len(names), *written]
  return ["| " + " | ".join(row) + " |" for row in rows] + [""]


def markdown(report: Report) -> str:
  """Returns a report as a Markdown page in the form of docs/results."""
  header = report.header
  lines = ["# Kernels on a GPU", ""]
  if header["dry_run"]:
    lines += [f"**{header['dry_run']}.** Checks ran in the interpreter, shapes were lowered.", ""]
  lines += [
    f"    {header['command']}",
    "",
    f"{header['date']} at {header['commit']}: {header['device']}, {header['driver']}, Python"
    f" {header['python']}, JAX {header['jax']}.",
    "",
  ]
  if report.machine is not None:
    lines += [
      f"This machine copies {report.machine.copy_bandwidth / 1e12:.2f} TB/s (read and written) and"
      f" multiplies bfloat16 at {report.machine.matmul_peak / 1e12:,.0f} TFLOP/s (the best of"
      " `jnp.dot` at 4096 and 8192). Shares are of these two.",
      "",
    ]
  for title, part in (
    ("What failed", report.failures),
    ("What was left out, for want of time", report.left_out),
  ):
    if part:
      lines += [f"## {title}", "", *(f"- {line}" for line in part), ""]
  if report.answers:
    lines += ["## Questions", ""]
    answers = [(a.name, a.asked, a.seen, a.change) for a in report.answers]
    lines += table(("question", "asked", "seen", "what may be changed"), answers)
  if report.checks:
    lines += ["## What has to hold", ""]
    for kernel in dict.fromkeys(done.kernel for done in report.checks):
      lines += [f"### {kernel}", ""]
      own = [done for done in report.checks if done.kernel == kernel]
      lines += table(
        ("kind", "what", "seen", "verdict"),
        [(c.kind, c.what, c.seen, verdict_of(c)) for c in own],
      )
  if report.rows:
    lines += [
      "## Speed",
      "",
      "Microseconds of one call: the median of interleaved turns, then their range; with several"
      " copies of the inputs, so that L2 holds none, and many calls per launch. Next to each peer,"
      " its time divided by the kernel's: above 1, the kernel is faster.",
      "",
    ]
    names = ("shape", "us", "of copy", "of peak", "peers", "bar", "verdict")
    for kernel in dict.fromkeys(row.kernel for row in report.rows):
      own = [row for row in report.rows if row.kernel == kernel]
      lines += [f"### {kernel}", "", *table(names, [(r.name, *cells(r)) for r in own])]
  return "\n".join(lines)


def verdict_of(done: Check) -> str:
  if done.kind == "question":
    return "yes" if done.passed else "no"
  return "ok" if done.passed else "FAILED"


if __name__ == "__main__":
  app.run(main)
