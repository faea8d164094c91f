#!/usr/bin/env bash
# Runs the checks, in three tiers: every day, all that CI runs, and the long ones.
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"
cd "$ROOT" || exit 1

# The oldest Python that we support, and what is tested on the newest alone: experiments, loops,
# launchers, tasks and the simulator are the same lines on both, and cost minutes.
OLDEST=3.11
NEWEST_ONLY="tests/experiments tests/launch tests/tasks tests/discovery tests/sandbox tests/simulate tests/test_rl.py
  tests/test_ttt.py tests/reports tests/test_vehicle_routing.py"
WORKERS=${SEERJAX_TEST_WORKERS:-2}

usage() {
  cat <<'EOF'
usage: bash launch/test.sh [--all | --changed[=REF] | --long] [pytest arguments]

Without arguments, what one runs every day, on the newest Python that is found: ruff, pyright, the
contract with its twins, and every room's everyday tests. Compiled programs are kept in .programs/
for the next time. With pytest arguments: pytest with them, no more.

  --changed    ruff, pyright, the contract, and the everyday tests of the rooms in which files differ
               from REF (by default from where this branch left origin/main) and of the rooms above
  --all        what CI runs, compiled anew: every day's tests and a fortieth of the thorough ones, drawn
               by the run's seed; the built wheel with every example, and installed alone as a server
               that answers curl; parity with Hugging Face where torch can be installed, and a
               tenth of the contract's files with a twentieth of the others on Python 3.11 and with
               AVX2 alone
  --long       runs the tests marked `long`, for an hour or two. What passed is kept in .long/; when
               started again at the same sources, only what is missing runs.
  --help       this text

  SEERJAX_TEST_SEED=N       repeats a run (each run prints its seed)
  SEERJAX_TEST_WORKERS=N    processes of pytest (2); 0 runs in one
  SEERJAX_PYTHON=/path      tests on that interpreter alone
EOF
}

tier=everyday reference=""
case ${1:-} in
  --help | -h)
    usage
    exit 0
    ;;
  --all | --long)
    tier=${1#--}
    shift
    ;;
  --changed | --changed=*)
    tier=changed
    reference=${1#--changed}
    reference=${reference#=}
    shift
    ;;
esac

# One seed for this run, hypothesis included, so that one number repeats all of it.
SEERJAX_TEST_SEED=${SEERJAX_TEST_SEED:-$((RANDOM * 32768 + RANDOM))}
export SEERJAX_TEST_SEED
export JAX_PLATFORMS=cpu
# NumPy multiplies the tiles of interpreted kernels. Of x86's products in OpenBLAS those for AVX2
# alone (Haswell, Zen) round a row by its place in the tile; these do not, and run everywhere. A
# machine whose environment names others must not bring them back.
export OPENBLAS_CORETYPE=Sandybridge
unset JAX_COMPILATION_CACHE_DIR
export JAX_COMPILATION_CACHE_MAX_SIZE=$((4 << 30)) # Old programs leave first.
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1
case $tier in
  everyday | changed)
    # From the second time on, most of a test's time was compilation.
    export JAX_COMPILATION_CACHE_DIR="$ROOT/.programs"
    ;;
  all)
    # A program that an earlier run kept would hide one that no longer compiles; within a run all
    # processes share what one of them compiled.
    PROGRAMS=$(mktemp -d) || exit 1
    export JAX_COMPILATION_CACHE_DIR=$PROGRAMS
    ;;
esac  # The long tests compile anew, each process by itself.

summary="" failures=0

# stage NAME COMMAND...: runs a check, remembers its result and its seconds.
stage() {
  local name=$1 started=$SECONDS verdict=ok
  shift
  printf '\n== %s\n' "$name"
  "$@" || {
    verdict=FAILED
    failures=$((failures + 1))
  }
  summary="$summary  $(printf '%-6s %5d s  %s' "$verdict" $((SECONDS - started)) "$name")
"
  [ "$verdict" = ok ]
}

finish() {
  printf '\n== summary (seed %s)\n%s' "$SEERJAX_TEST_SEED" "$summary"
  if [ "$failures" -eq 0 ]; then
    printf 'test.sh: passed in %d s\n' "$SECONDS"
    exit 0
  fi
  printf 'test.sh: %d stage(s) FAILED in %d s; SEERJAX_TEST_SEED=%s repeats this run\n' \
    "$failures" "$SECONDS" "$SEERJAX_TEST_SEED"
  exit 1
}

# environment_for MINOR DIR PYTHON
environment_for() {
  environment "$2" "$3" "launch/locks/runtime-$1.txt" "launch/locks/dev-$1.txt" "launch/locks/docs-$1.txt"
}

# parity MINOR DIR: adds torch, transformers and peft where this machine can install and import them.
#
# Not a failure where it cannot: the parity tests then skip, and say so.
parity() {
  [ -f "launch/locks/parity-$1.txt" ] || return 0
  if ! environment "$2" "$3" "launch/locks/parity-$1.txt" ||
    ! "$2/bin/python" -c 'import peft, torch, transformers' 2>/dev/null; then
    say "parity tests will skip: no CPU build of torch could be installed for Python $1"
    "$2/bin/python" -m pip uninstall --quiet --yes accelerate peft torch transformers >/dev/null 2>&1
    rm -f "$2/seerjax/parity-$1.txt"
  fi
}

# mooncake MINOR DIR PYTHON: adds Mooncake where this machine can install and import it; as parity.
mooncake() {
  environment "$2" "$3" "launch/locks/mooncake-$1.txt" &&
    "$2/bin/python" -c 'import mooncake.store' 2>/dev/null ||
    say "Mooncake's tests will skip: it cannot be installed, or libibverbs is missing (apt install libibverbs1)"
}

# oldest_environment DIR PYTHON: all that the oldest Python's tests need.
oldest_environment() {
  environment_for "$OLDEST" "$1" "$2" && parity "$OLDEST" "$1" "$2"
}

# settled PID LOG: waits for what runs beside us, prints what it said and returns its status.
settled() {
  local status=0
  wait "$1" || status=$?
  cat "$2"
  rm -f "$2"
  return $status
}

# run_pytest DIR ARGUMENT...
run_pytest() {
  local dir=$1
  shift
  # Tests that share programs stay in one process (ByFolder in tests/conftest.py).
  "$dir/bin/python" -m pytest -n "$WORKERS" --dist loadscope --hypothesis-seed="$SEERJAX_TEST_SEED" \
    -q -rs --durations=25 "$@"
}

# The contract holds on CPUs without AVX-512 too, for which XLA fuses and rounds differently: these
# tests run as such a CPU would. (Another kind of CPU ignores the flag.) Of the contract's files a
# tenth runs, each test with one of its parameters, and of the other files a twentieth, with what they
# run every day, all drawn by the seed: all of them have run on the newest Python just before.
run_oldest() {
  local skip ignored=()
  for skip in $NEWEST_ONLY; do ignored+=("--ignore=$skip"); done
  # Programs for AVX2 lie apart from those of this CPU.
  SEERJAX_TEST_SHARE=0.05 XLA_FLAGS="${XLA_FLAGS:-} --xla_cpu_max_isa=AVX2" \
    JAX_COMPILATION_CACHE_DIR="$PROGRAMS/avx2" run_pytest "$1" --everyday "${ignored[@]}"
}

# build_wheel DIR WORK: builds the wheel of this checkout into WORK/dist.
build_wheel() {
  mkdir "$2/source" && cp -R pyproject.toml LICENSE THIRD_PARTY.md seerjax pallas_kernels "$2/source" &&
    { [ ! -f README.md ] || cp README.md "$2/source"; } &&
    "$1/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-index \
      --no-build-isolation -w "$2/dist" "$2/source"
}

# served_wheel DIR MINOR: installs the built wheel with its extra `serve` as a stranger would, into an
# environment with nothing else, and asks its server by curl, twice with one seed.
#
# pip resolves the extra from the package index, held to the versions of the lock: what pyproject.toml
# forgets to name is missing here.
served_wheel() {
  local dir=$1 work python log url server line status=1
  work=$(mktemp -d) || return 1
  python="$work/venv/bin/python" log="$work/log"
  if build_wheel "$dir" "$work" && "$dir/bin/python" -m venv "$work/venv" &&
    "$python" -m pip install --quiet --quiet --disable-pip-version-check -c "launch/locks/runtime-$2.txt" \
      "$(echo "$work"/dist/seerjax-*.whl)[serve]"; then
    (cd "$work" && exec "$python" -I -m seerjax.serve --port=0 >"$log" 2>&1) &
    server=$!
    for _ in $(seq 1200); do # It compiles first: a minute or two where nothing is kept.
      url=$(sed -n 's,^serving at \(http://.*\)$,\1,p' "$log")
      { [ -z "$url" ] && kill -0 $server 2>/dev/null; } || break
      sleep 0.25
    done
    for _ in 1 2; do
      curl -sS --max-time 60 "$url/chat/completions" -H 'content-type: application/json' -d \
        '{"messages": [{"role": "user", "content": "How many?"}], "seed": 7, "logprobs": true}' |
        "$python" -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["choices"]))'
    done >"$work/said"
    kill -TERM $server
    wait $server
    # Two answers, and both the same.
    [ "$(grep -c '"finish_reason": "[sl]' "$work/said")" -eq 2 ] &&
      [ "$(sort -u "$work/said" | wc -l)" -eq 1 ] && status=0
    cut -c 1-300 "$work/said"
    [ $status -eq 0 ] || cat "$log"
  fi
  rm -rf "$work"
  return $status
}

# built_wheel DIR MINOR: installs the built wheel, and nothing else of this checkout, then runs every
# example against it.
#
# The wheel's environment has no pip and no packages of its own: a .pth file lends it the installed
# dependencies of DIR, which takes no time and no network. A folder named by a .pth file is searched
# for packages, but its own .pth files are not read; so the one with which DIR finds this checkout
# does not count, and `import seerjax` can only find the wheel.
built_wheel() {
  local dir=$1 work python example status=0
  work=$(mktemp -d) || return 1
  python="$work/venv/bin/python"
  build_wheel "$dir" "$work" &&
    "$dir/bin/python" -m venv --without-pip "$work/venv" &&
    "$dir/bin/python" -m pip --python "$python" install --quiet --disable-pip-version-check \
      --no-deps --no-index "$work"/dist/seerjax-*.whl &&
    "$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$work/lend.pth" &&
    cp "$work/lend.pth" "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" &&
    (cd "$work" && "$python" -I - "$ROOT" <<'EOF') || status=1
import pathlib, sys
import pallas_kernels, seerjax

for package in (pallas_kernels, seerjax):
  place = pathlib.Path(package.__file__)
  assert pathlib.Path(sys.prefix) in place.parents, f"{place} is not the wheel's"
for name in seerjax.__all__:
  getattr(seerjax, name)
print("the wheel imports:", seerjax.__version__)
EOF
  if [ $status -eq 0 ] && [ -d examples ]; then
    # Two at a time: most of an example is one core's work.
    cat >"$work/run.py" <<'EOF'
import json, pathlib, runpy, sys

# A notebook is its code cells, one after the other.
path = pathlib.Path(sys.argv[1])
if path.suffix == ".ipynb":
  cells = json.loads(path.read_text())["cells"]
  source = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
  path = pathlib.Path(path.stem + "_notebook.py")
  path.write_text(source)
sys.argv = [str(path)]
runpy.run_path(str(path), run_name="__main__")
EOF
    printf '%s\0' examples/*.py examples/*.ipynb |
      (cd "$work" && xargs -0 -n 1 -P 2 bash -c '
        said=$("$0" -I run.py "$1/$2" 2>&1)
        status=$?
        printf "%s\n" "-- $2" "$said"
        exit $status' "$python" "$ROOT") || status=1
  fi
  rm -rf "$work"
  return $status
}

# run_long DIR ARGUMENT...: runs each test marked `long` that has not passed yet at these sources.
#
# A file has a process of its own, so that its tests share programs; all in one would end at the
# kernel's bound on maps (vm.max_map_count), of which each program takes some.
run_long() {
  local dir=$1 sources finished work tests status=0
  shift
  # Uncommitted lines and new files count: a result belongs to the very sources that gave it. Prose
  # and results are no sources.
  sources=$(git ls-files -coz --exclude-standard -- . ':!docs' ':!*.md' |
    xargs -0 cksum 2>/dev/null | cksum | cut -d' ' -f1)
  mkdir -p .long && work=$(mktemp -d) || return 1
  finished="$ROOT/.long/$sources.txt"
  touch "$finished" || return 1
  tests=$("$dir/bin/python" -m pytest -m long --collect-only -q --finished="$finished" "$@" 2>&1)
  case $? in
    0 | 5) ;; # 5: nothing is left to run.
    *)
      printf '%s\n' "$tests"
      return 1
      ;;
  esac
  printf '%s\n' "$tests" | grep '::' | (
    cd "$work" && awk '{ file = $0; sub("::.*", "", file); gsub("/", ".", file); print > file }'
  )
  # --timeout=0: how long a long test may take is its own affair.
  find "$work" -type f -print0 | sort -z | xargs -0 -r -n 1 -P "$((WORKERS > 1 ? WORKERS : 1))" bash -c '
    said=$("$0" -m pytest -m long -q -rs --timeout=0 --hypothesis-profile=long \
      --hypothesis-seed="$SEERJAX_TEST_SEED" --finished="$1" "@$2" 2>&1 </dev/null)
    status=$?
    printf "%s\n" "-- $(basename "$2")" "$said"
    exit $status' "$dir/bin/python" "$finished" || status=1
  rm -rf "$work"
  printf '\nevents of the tests that passed:\n'
  grep '^#' "$finished"
  printf '%d of %d tests that were missing have passed now, %d at these sources: %s\n' \
    "$(printf '%s\n' "$tests" | grep '::' | grep -cxFf "$finished")" \
    "$(printf '%s\n' "$tests" | grep -c '::')" "$(grep -vc '^#' "$finished")" ".long/$sources.txt"
  return $status
}

found=$(find_python) || exit 1
minor=${found%% *}
python=${found#* }
newest="$ROOT/.venv"

stage "environment, Python $minor" environment_for "$minor" "$newest" "$python" || finish

if [ "$tier" = long ]; then
  stage "long tests" run_long "$newest" "$@"
  finish
fi
if [ $# -gt 0 ]; then
  stage "pytest $*, Python $minor" run_pytest "$newest" "$@"
  finish
fi

# tests_of_changes: prints the tests that concern what differs from `reference`, one a line.
tests_of_changes() {
  local base=${reference:-$(git merge-base HEAD origin/main 2>/dev/null)}
  git rev-parse --verify --quiet "${base:-HEAD}^{commit}" >/dev/null || {
    say "--changed: got '$base', expected a commit; name one with --changed=REF."
    return 1
  }
  { git diff --name-only "${base:-HEAD}" && git ls-files -o --exclude-standard; } |
    xargs "$newest/bin/python" tests/support/import_graph.py
}

if [ "$tier" != all ]; then
  paths=""
  if [ "$tier" = changed ]; then
    paths=$(tests_of_changes) || exit 1
    say "tests of what changed:" $paths
  fi
  stage "ruff" "$newest/bin/python" -m ruff check .
  stage "pyright" "$newest/bin/python" -m pyright --pythonpath "$newest/bin/python"
  # shellcheck disable=SC2086 # Paths of ours hold no spaces.
  stage "everyday tests, Python $minor" run_pytest "$newest" --everyday $paths
  finish
fi

# What takes one core runs beside the examples: pyright, and making the oldest Python's environment.
typed=$(mktemp) || exit 1
"$newest/bin/python" -m pyright --pythonpath "$newest/bin/python" >"$typed" 2>&1 &
typing=$!
trap 'kill $typing ${preparing:-} 2>/dev/null; rm -rf "$PROGRAMS"' EXIT
if [ "$minor" != "$OLDEST" ] && [ -z "${SEERJAX_PYTHON:-}" ] &&
  found=$(find_python "$OLDEST" 2>/dev/null); then
  oldest="$ROOT/.venv-$OLDEST"
  said=$(mktemp) || exit 1
  oldest_environment "$oldest" "${found#* }" >"$said" 2>&1 &
  preparing=$!
fi

stage "ruff" "$newest/bin/python" -m ruff check .
stage "wheel and examples, Python $minor" built_wheel "$newest"
stage "wheel alone answers a curl, Python $minor" served_wheel "$newest" "$minor"
# Before torch comes: where it is, pyright reads its types.
stage "pyright (beside them)" settled "$typing" "$typed"
stage "parity packages, Python $minor" parity "$minor" "$newest" "$python"
stage "Mooncake, Python $minor" mooncake "$minor" "$newest" "$python"
SEERJAX_TEST_SHARE_OF_THOROUGH=0.025 stage "tests, Python $minor" run_pytest "$newest"

if [ -n "${preparing:-}" ]; then
  stage "environment, Python $OLDEST (made beside the examples)" settled "$preparing" "$said" &&
    stage "a part of the contract and of the unit tests, Python $OLDEST" run_oldest "$oldest"
elif [ "$minor" != "$OLDEST" ]; then
  summary="$summary  $(printf '%-6s %5d s  %s' skipped 0 "Python $OLDEST: none found")
"
fi
finish
