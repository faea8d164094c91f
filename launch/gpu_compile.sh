#!/usr/bin/env bash
# Compiles the GPU kernels, and the steps that launch them, for an H200 on a machine without one.
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"
cd "$ROOT" || exit 1

# Pythons with a lock: JAX's GPU interpreter and this way to SASS need Python 3.12.
GPU_MINORS="3.13 3.12"
PARTS="kernels step tests"

usage() {
  cat <<'EOT'
usage: bash launch/gpu_compile.sh [--only=PART,...] [--out=DIR]

Creates .venv-gpu-compile (about 1.5 GB: our packages, pytest, JAX's CUDA plugin and nvdisasm; no
driver and no CUDA toolkit), then compiles every kernel, one layer of the engine's step and one of a
train step to SASS, without a GPU. It fails if a kernel does not compile, spills registers, serialises
its tensor core products, or has arithmetic that depends on the number of rows. Tables and a log of
each part go to DIR, runs/gpu_compile by default.

  kernels    every case of the benchmark, forward and backward
  step       the engine's step and a train step of Qwen3-8B, and its paper roofline
  tests      deliberately broken kernels are refused; the engine's whole step compiles

  SEERJAX_PYTHON=/path    creates the environment with that Python
EOT
}

out="$ROOT/runs/gpu_compile" only=$PARTS
for argument in "$@"; do
  case $argument in
    --help | -h)
      usage
      exit 0
      ;;
    --only=*) only=${argument#--only=} ;;
    --out=*) out=${argument#--out=} ;;
    *) fail "got '$argument', expected --only=, --out= or --help." ;;
  esac
done
only=${only//,/ }
for part in $only; do
  case " $PARTS " in
    *" $part "*) ;;
    *) fail "--only: got '$part', expected some of: $PARTS." ;;
  esac
done

found=$(find_python "$GPU_MINORS") || exit 1
minor=${found%% *} dir="$ROOT/.venv-gpu-compile"
environment "$dir" "${found#* }" "launch/locks/runtime-$minor.txt" "launch/locks/dev-$minor.txt" \
  "launch/locks/gpu-compile-$minor.txt" || exit 1
mkdir -p "$out" || fail "--out: got '$out', expected a folder that can be created."
export JAX_PLATFORMS=cpu PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
python="$dir/bin/python"

summary="" failures=0
# part NAME COMMAND...: runs a part, and records its result and duration.
part() {
  local name=$1 started=$SECONDS verdict=ok
  shift
  printf '\n== %s\n' "$name"
  "$@" 2>&1 | tee "$out/$name.log"
  [ "${PIPESTATUS[0]}" -eq 0 ] || {
    verdict=FAILED
    failures=$((failures + 1))
  }
  summary="$summary  $(printf '%-6s %5d s  %s' "$verdict" $((SECONDS - started)) "$name")
"
}

for name in $only; do
  case $name in
    kernels) part kernels "$python" -m pallas_kernels.compile_report --out="$out" ;;
    step) part step "$python" -m experiments.compiled.gpu_step --out="$out" ;;
    tests)
      part tests "$python" -m pytest -n 0 -q -rs tests/pallas_kernels/test_compile_report.py \
        tests/experiments/compiled/test_gpu_step.py
      ;;
  esac
done

printf '\n== summary\n%s' "$summary"
if [ "$failures" -eq 0 ]; then
  printf 'gpu_compile.sh: passed in %d s; %s\n' "$SECONDS" "$out"
  exit 0
fi
printf 'gpu_compile.sh: %d part(s) FAILED in %d s; %s\n' "$failures" "$SECONDS" "$out"
exit 1
