#!/usr/bin/env bash
# Runs all open checks on a machine with a Hopper GPU, in parts of at most ten minutes each.
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

PARTS="1 2 3 4 5 6 7"
# Time limit of each part in seconds; the limit of a dry run, which interprets, is for a slow CPU.
LIMITS="480 360 480 480 480 360 480"
DRY_LIMIT=900

usage() {
  cat <<'EOF'
usage: bash launch/gpu_check.sh [--part=N,N] [--together] [--dry_run] [--out=DIR] [--wheels=DIR]
                                [--seconds=N]

Runs on a machine with an NVIDIA H100 or H200, with a Python that has JAX with CUDA, NumPy and
absl-py. It installs nothing and uses no network. First it describes the machine; then it runs these
parts, in this order, for at most 45 minutes:

  1 kernels    each kernel runs, agrees with its definition, keeps a row's bits         8 minutes
  2 questions  questions about the contract, worst first                               6
  3 bits       engine = trainer on this GPU: self-tests, tests of kernels and contract  8
  4 speed      kernels against cuBLAS and copies, at the engine's own shapes             8
  5 steps      the engine's own step: tiled, pallas, pallas with command buffers        8
  6 job        the main job twice, shortened, and one SHA-256                           6
  7 memory     every kernel under compute-sanitizer: memcheck, then racecheck           8

A part runs several processes, each with its own time limit, so a process that hangs costs only its
own time. Missing packages are listed and are not a failure. The exit status is 1 if a process failed
or ran out of time.

  --part=N,N    run only these parts
  --together    run processes that measure no time (all but those of parts 4 and 5) concurrently: for a
                machine with many cores and a GPU that is billed by the minute
  --dry_run     run all parts on a CPU, with small sizes and the interpreter instead of the GPU
  --out=DIR     directory for summary.txt, and partN.log and partN.tar.gz of each part N, which grow
                after every process (runs/gpu_check)
  --wheels=DIR  directory of wheels for packages that this Python lacks (.whl in the checkout),
                such as ml_collections and tensorboardX (for part 6) and beartype (for part 3):
                python3 -m pip download --no-deps --only-binary=:all: -d .whl NAME==VERSION
  --seconds=N   time limit per part, instead of the minutes above
  --help        this text

  SEERJAX_PYTHON=/path/to/python   uses that interpreter
EOF
}

out="$ROOT/runs/gpu_check" parts="" seconds="" dry_run="" together="" wheels="$ROOT/.whl"
for argument in "$@"; do
  case $argument in
    --dry_run) dry_run=yes ;;
    --together) together=yes ;;
    --out=*) out=${argument#*=} ;;
    --part=*) parts=${argument#*=} ;;
    --wheels=*) wheels=${argument#*=} ;;
    --seconds=*) seconds=${argument#*=} ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail "got '$argument', expected --part=, --together, --dry_run, --out=, --wheels=," \
      "--seconds= or --help." ;;
  esac
done
[ -n "$parts" ] || parts=$PARTS
parts=${parts//,/ }
for part in $parts; do
  case " $PARTS " in
    *" $part "*) ;;
    *) fail "--part: got '$part', expected some of: $PARTS." ;;
  esac
done
case $seconds in
  *[!0-9]*) fail "--seconds: got '$seconds', expected a number of seconds." ;;
esac

# lacks PYTHON: prints one line about what it lacks to run the kernels; nothing if it can.
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

# missing_modules NAME...: prints the modules that $python lacks.
missing_modules() {
  "$python" -c '
import importlib.util, sys

print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
' "$@"
}

# candidates: prints the interpreter of launch/local.sh's environment, then those on PATH.
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

mkdir -p "$out" || fail "--out: got '$out', expected a folder that can be created."
out=$(cd "$out" && pwd)
scratch=$(mktemp -d) || fail "got no temporary folder, expected one; set TMPDIR."
trap 'rm -rf "$scratch"' EXIT
for wheel in "$wheels"/*.whl; do
  [ -e "$wheel" ] || continue
  "$python" -m zipfile -e "$wheel" "$scratch/site" ||
    fail "--wheels: got '$wheel', expected a wheel; download it again."
done
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}:$scratch/site"
# JAX leaves GPU memory to PyTorch, and to an earlier process that is still exiting.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# Autotuning could choose different tilings in two runs or processes.
[ -n "$dry_run" ] || export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_gpu_autotune_level=0"
cd "$ROOT" || exit 1

commit=$(git rev-parse --short HEAD 2>/dev/null || printf 'unknown')
: >"$out/summary.txt"

# tell LINE: prints a line, and adds it to the summary.
tell() { printf '%s\n' "$*" | tee -a "$out/summary.txt"; }

tell "commit $commit, parts $parts${dry_run:+, a dry run: nothing here was measured}"
if type -P nvidia-smi >/dev/null; then
  tell "$(nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,power.limit --format=csv,noheader)"
else
  tell "no nvidia-smi"
fi
tell "$("$python" -c '
import sys, jax

print(sys.executable, "Python", sys.version.split()[0], "JAX", jax.__version__, *jax.devices())
')"

wanted_together=$together
failures=0 end=0 number=0 at_once=0
parts_at_once=()

# begin NUMBER: starts a part; its processes share its time limit.
begin() {
  local limits
  number=$1
  read -ra limits <<<"$LIMITS"
  end=$((SECONDS + ${seconds:-${dry_run:+$DRY_LIMIT}}))
  [ -n "$seconds$dry_run" ] || end=$((SECONDS + limits[number - 1]))
  : >"$out/part$number.log"
  mkdir -p "$scratch/part$number"
  case $number in
    4 | 5) together="" ;;
    *) together=$wanted_together ;;
  esac
  # Timed parts run alone.
  [ -n "$together" ] || join
  tell "part $number"
}

# process NAME LIMIT MODULES COMMAND...: runs a process of a part, within LIMIT and the part's
# limit.
#
# The space-separated MODULES must be importable. Results are archived before the next process
# starts; those of concurrent processes, by `join`.
process() {
  local name=$1 limit=$2 modules missing left=$((end - SECONDS))
  read -ra modules <<<"$3"
  shift 3
  missing=$(missing_modules ${modules[@]+"${modules[@]}"})
  if [ -n "$missing" ]; then
    absent "$name" "this Python has no $missing, and no wheel of it lies in $wheels"
    return
  fi
  [ -z "$dry_run" ] || limit=$left
  [ "$limit" -le "$left" ] || limit=$left
  if [ -n "$together" ]; then
    at_once=$((at_once + 1))
    limited "$name" "$limit" "$scratch/$at_once.verdict" "$@" >"$scratch/$at_once.log" 2>&1 &
    parts_at_once[at_once]=$number
    return
  fi
  limited "$name" "$limit" "$scratch/verdict" "$@" 2>&1 | tee -a "$out/part$number.log"
  tar -czf "$out/part$number.tar.gz" -C "$scratch" "part$number"
  settle "$scratch/verdict"
}

# limited NAME LIMIT FILE COMMAND...: runs a command within LIMIT seconds; writes its verdict to
# FILE.
limited() {
  local name=$1 limit=$2 file=$3 verdict=ok started=$SECONDS
  shift 3
  printf '\n== part %s: %s\n' "$number" "$name"
  if [ "$limit" -le 0 ]; then
    verdict="NO TIME"
  else
    timeout --kill-after=10 "$limit" "$@"
    case $? in
      0) ;;
      124 | 137) verdict="NO TIME" ;;
      *) verdict=FAILED ;;
    esac
  fi
  printf '  %-8s %5d s  %s\n' "$verdict" $((SECONDS - started)) "$name" >"$file"
}

# settle FILE: prints the verdict of a finished process, and counts a failure.
settle() {
  local line
  line=$(cat "$1" 2>/dev/null) || line="  FAILED       ? s  a process that left no line"
  case $line in
    "  ok"*) ;;
    *) failures=$((failures + 1)) ;;
  esac
  tell "$line"
}

# join: waits for concurrent processes.
join() {
  local i
  wait
  for ((i = 1; i <= at_once; i++)); do
    tee -a "$out/part${parts_at_once[i]}.log" <"$scratch/$i.log"
  done
  for ((i = 1; i <= at_once; i++)); do
    [ "${parts_at_once[i]}" = "${parts_at_once[i - 1]:-}" ] || tell "part ${parts_at_once[i]}, at once"
    tar -czf "$out/part${parts_at_once[i]}.tar.gz" -C "$scratch" "part${parts_at_once[i]}"
    settle "$scratch/$i.verdict"
  done
  at_once=0
}

# absent NAME WHY: reports a process that cannot run here, which is not a failure.
absent() { tell "$(printf '  %-8s %5d s  %s' "not run" 0 "$1: $2")"; }

# bench NAME LIMIT FLAG...: runs the kernels' benchmark in a separate process.
bench() {
  local name=$1 limit=$2
  shift 2
  process "$name" "$limit" "" "$python" -m pallas_kernels.bench --commit="$commit" \
    --out="$scratch/part$number/${name// /_}" ${dry_run:+--dry_run} "$@"
}

KERNELS="matmul attention token_logprobs rms_norm grouped_matmul"
LIBRARY="flax optax orbax jaxtyping numba tokenizers safetensors"
TESTS="pytest pytest_timeout xdist hypothesis $LIBRARY"

kernels() {
  local kernel
  for kernel in $KERNELS; do bench "$kernel" 110 --checks_only --only="$kernel" --seconds=90; done
}

questions() {
  local question
  for question in parallel_merge wgmma_height wgmma_width operand_order glue_fma cpu_lowering \
    register_operand; do
    bench "$question" 75 --question="$question"
  done
}

# self_test IMPLEMENTATION LIMIT: counts bits of a row that change with the rest of the batch.
self_test() {
  local backend=$1
  [ -z "$dry_run" ] || backend=${backend/pallas/pallas_interpreted}
  process "self_test $1" "$2" "$LIBRARY" "$python" -c '
import sys

from seerjax import xla_flags

xla_flags.pin(print)
from seerjax.numerics import NumericsConfig
from seerjax.run import self_test

small = dict(row_tile=4, query_tile=4, slot_tile=2, kv_split=64, reduction_shards=1)
config = NumericsConfig(
  backend=sys.argv[1], compute_dtype="bfloat16", **(small if sys.argv[2] else {})
)
print(self_test.describe(config))
self_test.require(config)
' "$backend" "$dry_run"
}

bits() {
  local platforms=cuda,cpu
  [ -z "$dry_run" ] || platforms=cpu
  self_test pallas 150
  self_test tiled 120
  process "tests of the contract" 180 "$TESTS" env SEERJAX_TEST_PLATFORMS=$platforms \
    "$python" -m pytest -n 0 -q -m "not gpu" tests/contract/test_kernels.py
  if [ -n "$dry_run" ]; then
    absent "tests of the kernels" "they need a GPU"
  else
    process "tests of the kernels" 150 "$TESTS" env SEERJAX_TEST_PLATFORMS=$platforms \
      "$python" -m pytest -n 0 -q -m gpu tests/pallas_kernels
  fi
}

speed() {
  # Here cuBLAS may choose by speed, because no bits are compared.
  local -x XLA_FLAGS=${XLA_FLAGS:-}
  XLA_FLAGS=${XLA_FLAGS/--xla_gpu_autotune_level=0/}
  bench "speed of matmul" 180 --only=matmul --models=Qwen3-8B --tiny_checks --seconds=160
  bench "speed of attention" 150 --only=attention --models=Qwen3-8B --tiny_checks --seconds=130
  bench "speed of token_logprobs" 70 --only=token_logprobs --models=Qwen3-8B --tiny_checks \
    --seconds=60
  bench "speed of rms_norm" 50 --only=rms_norm --models=Qwen3-8B --tiny_checks --seconds=40
  bench "decode_bandwidth" 60 --question=decode_bandwidth
  bench "prefill_merge" 45 --question=prefill_merge
}

# steps_of NAME IMPLEMENTATION FLAGS: times the engine's step with XLA's FLAGS.
steps_of() {
  process "$1" 160 "$LIBRARY" env XLA_FLAGS="${XLA_FLAGS:-} $3" \
    "$python" -m experiments.compiled.engine_step --backend="$2" --rows=64,1,16,256 \
    --out="$scratch/part$number/steps.jsonl" ${dry_run:+--dry_run --rows=1,16}
}

steps() {
  steps_of "pallas" pallas "--xla_gpu_enable_command_buffer="
  steps_of "pallas with command buffers" pallas \
    "--xla_gpu_enable_command_buffer=$COMMAND_BUFFERS --xla_gpu_graph_min_graph_size=1"
  steps_of "tiled" tiled "--xla_gpu_enable_command_buffer="
}
COMMAND_BUFFERS=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN

job() {
  local run sums
  local small=(
    --config.num_steps=2 --config.data_parallel_size=1 --config.rollout.prompts_per_step=8
    --config.evaluation.num_problems=128
  )
  [ -z "$dry_run" ] || small=(
    --config.num_steps=1 --config.data_parallel_size=1 --config.rollout.prompts_per_step=2
    --config.rollout.group_size=2 --config.rollout.max_tokens=16 --config.evaluation.num_problems=8
  )
  for run in first second; do
    process "the main job, $run" 180 "$LIBRARY ml_collections tensorboardX" \
      "$python" -m seerjax.commands train --workdir="$scratch/part$number/$run" "${small[@]}"
  done
  join
  sums=$(cd "$scratch/part$number" && sha256sum ./*/model/model.safetensors 2>/dev/null)
  [ -n "$sums" ] || return
  if [ "$(printf '%s\n' "$sums" | cut -d' ' -f1 | sort | uniq -c | sed 's/^ *//' | cut -d' ' -f1)" = 2 ]; then
    tell "  one SHA-256 of what both learned: ${sums%% *}"
  else
    tell "  FAILED   no one SHA-256 of what both learned:"
    tell "$sums"
    failures=$((failures + 1))
  fi
}

memory() {
  local tool kernel sanitizer
  sanitizer=$(type -P compute-sanitizer || printf '/usr/local/cuda/bin/compute-sanitizer')
  if [ -n "$dry_run" ]; then
    # The interpreter detects races itself.
    bench "small checks of rms_norm" 90 --small --only=rms_norm
    return
  elif [ ! -x "$sanitizer" ]; then
    absent memory "no compute-sanitizer on PATH or in /usr/local/cuda/bin"
    return
  fi
  for tool in memcheck racecheck; do
    for kernel in $KERNELS; do
      process "$tool of $kernel" 90 "" "$sanitizer" --tool "$tool" --error-exitcode 9 \
        --target-processes all "$python" -m pallas_kernels.bench --small --only="$kernel" \
        --out="$scratch/part$number/${tool}_$kernel" --commit="$commit"
    done
  done
}

for part in $parts; do
  begin "$part"
  case $part in
    1) kernels ;;
    2) questions ;;
    3) bits ;;
    4) speed ;;
    5) steps ;;
    6) job ;;
    7) memory ;;
  esac
done
join

printf '\n== summary\n'
cat "$out/summary.txt"
if [ "$failures" -eq 0 ]; then
  printf 'gpu_check.sh: passed in %d s; %s\n' "$SECONDS" "$out"
  exit 0
fi
printf 'gpu_check.sh: %d process(es) FAILED in %d s; %s\n' "$failures" "$SECONDS" "$out"
exit 1
