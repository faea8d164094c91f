#!/usr/bin/env bash
# Checks and times the kernels on a GPU machine, with what is installed there; nothing is installed.
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

PARTS="racecheck memcheck kernels self_test contract bench"
# What a part may take, in seconds; the bench takes what is left.
SHORT_PART=50

usage() {
  cat <<'EOF'
usage: bash launch/gpu_check.sh [--dry_run] [--out=DIR] [--only=PART,PART] [--seconds=N]

Runs the repository's kernels on a machine with an NVIDIA H100 or H200, by a Python there that has
JAX with CUDA, NumPy and absl-py. Nothing is installed. First it says what the machine is; then, each
within a limit of time:

  racecheck  tiny checks of every kernel under compute-sanitizer, where that is present
  memcheck   the same, for accesses out of bounds
  kernels    tests marked `gpu`, where pytest and what tests need are present
  self_test  the start-up measurement of the portable path, where its packages are present
  contract   tests/contract on the GPU, where pytest and what tests need are present
  bench      python -m pallas_kernels.bench: agreement, invariance, then the table
  questions  python -m pallas_kernels.bench --question=all; only where --only names it

What is not present is named, and is no failure. The exit status is 1 if any part failed or ran out
of time.

  --dry_run      on a CPU: bench interprets and lowers; parts that need a GPU are left out
  --out=DIR      gets DIR/bench.json, DIR/bench.md and a log of each part (runs/gpu_check)
  --only=PARTS   these parts alone, with commas between; one part alone gets all the time
  --seconds=N    for all parts together (470; 1800 in a dry run)
  --help         this text

  SEERJAX_PYTHON=/path/to/python   uses that interpreter
EOF
}

out="$ROOT/runs/gpu_check" only="" seconds="" dry_run=""
for argument in "$@"; do
  case $argument in
    --dry_run) dry_run=yes ;;
    --out=*) out=${argument#*=} ;;
    --only=*) only=${argument#*=} ;;
    --seconds=*) seconds=${argument#*=} ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail "got '$argument', expected --dry_run, --out=, --only=, --seconds= or --help." ;;
  esac
done
[ -n "$only" ] || only=$PARTS
only=${only//,/ }
for part in $only; do
  case " $PARTS questions " in
    *" $part "*) ;;
    *) fail "--only: got '$part', expected some of: $PARTS questions." ;;
  esac
done
if [ -z "$seconds" ]; then
  seconds=470
  [ -z "$dry_run" ] || seconds=1800
fi
case $seconds in
  *[!0-9]*) fail "--seconds: got '$seconds', expected a number of seconds." ;;
esac
case $only in
  *' '*) ;;
  *) SHORT_PART=$seconds ;;
esac

# lacks PYTHON: prints what it lacks to run the kernels, in one line; nothing if it can.
lacks() {
  "$1" -c '
import importlib.util, os, sys

names = {"jax": "jax", "numpy": "numpy", "absl": "absl-py"}
missing = [package for name, package in names.items() if importlib.util.find_spec(name) is None]
if sys.version_info < (3, 11):
  print("it is Python %d.%d, expected 3.11 or later" % sys.version_info[:2])
elif missing:
  print("it has no " + ", no ".join(missing))
elif sys.argv[1] != "yes":
  import jax

  try:
    devices = jax.devices("gpu")
  except RuntimeError:
    devices = []
  if not devices:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    print("its JAX %s sees no GPU (JAX_PLATFORMS=%r)" % (jax.__version__, platforms))
' "${dry_run:-no}" 2>/dev/null || printf 'it does not run'
}

# missing_modules NAME...: prints those that $python lacks.
missing_modules() {
  "$python" -c '
import importlib.util, sys

print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
' "$@"
}

# candidates: the environment of launch/local.sh, then what PATH holds.
candidates() {
  if [ -z "${SEERJAX_PYTHON:-}" ] && [ -x "$ROOT/.venv/bin/python" ]; then
    printf '%s\n' "$ROOT/.venv/bin/python"
  fi
  python_candidates
}

[ -z "$dry_run" ] || export JAX_PLATFORMS=cpu
wanted="jax[cuda] that sees a GPU"
[ -z "$dry_run" ] || wanted=jax
python="" complaints="" tried=""
while IFS= read -r candidate; do
  case $tried in *":$candidate:"*) continue ;; esac
  tried="$tried:$candidate:"
  lack=$(lacks "$candidate")
  if [ -z "$lack" ]; then
    python=$candidate
    break
  fi
  complaints="$complaints
  $candidate: $lack"
done <<EOF
$(candidates)
EOF
[ -n "$python" ] || fail "got no Python that can run the kernels, expected one with $wanted, numpy and" \
  "absl-py; name one with SEERJAX_PYTHON=/path/to/python. Tried:$complaints"

mkdir -p "$out" || fail "--out: got '$out', expected a folder that can be made."
out=$(cd "$out" && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# JAX leaves memory of the GPU to PyTorch, and to the part before it that still ends.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
cd "$ROOT" || exit 1

printf '== machine\n'
if type -P nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,power.limit --format=csv
else
  printf 'no nvidia-smi\n'
fi
"$python" -c '
import sys, jax

print(sys.executable, "Python", sys.version.split()[0], "JAX", jax.__version__, *jax.devices())
'
commit=$(git rev-parse --short HEAD 2>/dev/null || printf 'unknown')
printf 'commit %s\n' "$commit"

summary="" failures=0

# note VERDICT SECONDS TEXT: adds a line to the summary.
note() {
  summary="$summary  $(printf '%-8s %5d s  %s' "$1" "$2" "$3")
"
}

# part NAME LIMIT COMMAND...: runs a part within its limit, and within what is left of all seconds.
part() {
  local name=$1 limit=$2 started=$SECONDS left=$((seconds - SECONDS)) status verdict=ok
  shift 2
  [ "$limit" -le "$left" ] || limit=$left
  printf '\n== %s\n' "$name"
  if [ "$limit" -le 0 ]; then
    note "NO TIME" 0 "$name: --only=$name --seconds=N gives it more"
    failures=$((failures + 1))
    return
  fi
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  case $status in
    0) ;;
    124 | 137) verdict="NO TIME" ;;
    *) verdict=FAILED ;;
  esac
  [ "$verdict" = ok ] || failures=$((failures + 1))
  note "$verdict" $((SECONDS - started)) "$name"
}

# absent NAME WHY: a part that cannot run here, which is no failure.
absent() {
  printf '\n== %s\nnot run: %s\n' "$1" "$2"
  note "not run" 0 "$1: $2"
}

# sanitize TOOL: tiny checks of every kernel under a tool of compute-sanitizer.
sanitize() {
  local sanitizer
  sanitizer=$(type -P compute-sanitizer || printf '/usr/local/cuda/bin/compute-sanitizer')
  if [ -n "$dry_run" ]; then
    absent "$1" "it needs a GPU"
  elif [ ! -x "$sanitizer" ]; then
    absent "$1" "no compute-sanitizer on PATH or in /usr/local/cuda/bin"
  else
    part "$1" "$SHORT_PART" "$sanitizer" --tool "$1" --error-exitcode 9 --target-processes all \
      "$python" -m pallas_kernels.bench --small --out="$out/$1" --commit="$commit"
  fi
}

# tested NAME MODULES COMMAND...: a part that needs modules, their names with spaces between.
tested() {
  local name=$1 modules missing
  read -ra modules <<<"$2"
  shift 2
  missing=$(missing_modules "${modules[@]}")
  if [ -n "$dry_run" ]; then
    absent "$name" "it needs a GPU"
  elif [ -n "$missing" ]; then
    absent "$name" "this Python has no $missing"
  else
    part "$name" "$SHORT_PART" "$@"
  fi
}

LIBRARY="flax optax orbax jaxtyping ml_collections numba tokenizers safetensors"
TESTS="pytest pytest_timeout hypothesis jaxtyping beartype $LIBRARY"

for name in $only; do
  case $name in
    racecheck | memcheck) sanitize "$name" ;;
    kernels)
      tested kernels "$TESTS" env SEERJAX_TEST_PLATFORMS=cuda,cpu \
        "$python" -m pytest -q -m gpu tests/pallas_kernels
      ;;
    self_test)
      tested self_test "$LIBRARY" "$python" -c '
from seerjax import numerics, self_test

config = numerics.NumericsConfig()
print(self_test.describe(config))
self_test.require(config)
'
      ;;
    contract)
      tested contract "$TESTS" env SEERJAX_TEST_PLATFORMS=cuda,cpu \
        "$python" -m pytest -q -x tests/contract
      ;;
    bench)
      left=$((seconds - SECONDS - 10))
      [ "$left" -gt 1 ] || left=1
      part bench "$seconds" "$python" -m pallas_kernels.bench --out="$out" --seconds="$left" \
        --commit="$commit" ${dry_run:+--dry_run}
      ;;
    questions)
      part questions "$seconds" "$python" -m pallas_kernels.bench --question=all \
        --out="$out/questions" --commit="$commit" ${dry_run:+--dry_run}
      ;;
  esac
done

printf '\n== summary\n%s' "$summary"
if [ "$failures" -eq 0 ]; then
  printf 'gpu_check.sh: passed in %d s; %s\n' "$SECONDS" "$out"
  exit 0
fi
printf 'gpu_check.sh: %d part(s) FAILED in %d s; %s\n' "$failures" "$SECONDS" "$out"
exit 1
