# Shell functions shared by the scripts of launch/: find a Python, create an environment from locked
# versions, choose a platform, parse the arguments of a run. Source it with ROOT set to the
# checkout.
#
# Works with Bash 3.2 (the newest on macOS). Messages go to stderr, so that the output of an
# experiment can be piped. An environment keeps its state in a folder `seerjax`, with one file per
# installed lock that has the lock's checksum.

# Versions with a lock, newest first.
PYTHON_MINORS="3.13 3.12 3.11"

say() { printf 'seerjax: %s\n' "$*" >&2; }
fail() {
  say "$@"
  exit 1
}

# python_candidates: prints the interpreters to try, best first, one per line.
#
# Searches all of PATH, because its first python3.12 may be a pyenv shim that only reports that no
# such version is selected here.
python_candidates() {
  local minor path
  if [ -n "${SEERJAX_PYTHON:-}" ]; then
    printf '%s\n' "$SEERJAX_PYTHON"
    return
  fi
  for minor in ${1:-$PYTHON_MINORS}; do
    type -aP "python$minor" || :
    for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$minor".*/bin/python; do
      [ -x "$path" ] && printf '%s\n' "$path"
    done
  done
  type -aP python3 || :
  type -aP python || :
}

# find_python [MINOR]: prints "MINOR PATH" of the newest Python that can create an environment.
#
# Returns 1 after a message about each candidate. With MINOR, only that version is accepted.
find_python() {
  local minors=${1:-$PYTHON_MINORS} candidate minor missing package complaints=""
  while IFS= read -r candidate; do
    minor=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || {
      [ -z "${SEERJAX_PYTHON:-}" ] || complaints="$complaints
  $candidate does not run: set SEERJAX_PYTHON to a Python interpreter, or unset it"
      continue
    }
    case " $minors " in
      *" $minor "*) ;;
      *)
        complaints="$complaints
  $candidate is Python $minor, expected one of: $minors"
        continue
        ;;
    esac
    missing=""
    # On Debian and Ubuntu, ensurepip and venv are separate packages.
    "$candidate" -c 'import venv, ensurepip' 2>/dev/null || missing="python$minor-venv"
    if [ -n "$missing" ]; then
      package="apt install $missing"
      complaints="$complaints
  $candidate has no venv or ensurepip: $package"
      continue
    fi
    printf '%s %s\n' "$minor" "$candidate"
    return 0
  done <<EOF
$(python_candidates "$minors")
EOF
  say "got no Python that can create an environment, expected one of $minors with venv and ensurepip;" \
    "install one, or name one with SEERJAX_PYTHON=/path/to/python.${complaints:+ Tried:$complaints}"
  return 1
}

# environment DIR PYTHON LOCK...: installs the packages of the locks into DIR, at their versions.
#
# Does nothing if they are installed already. Packages are installed without dependency resolution,
# because a lock is complete. Byte code is compiled on first import, so only for modules in use.
environment() {
  local dir=$1 python=$2 lock stamp identity log
  shift 2
  identity=$("$python" -c 'import sys; print(sys.version.split()[0], sys.base_prefix)')" for $ROOT"
  if [ -e "$dir" ] && [ "$(cat "$dir/seerjax/identity" 2>/dev/null)" != "$identity" ]; then
    [ -d "$dir/seerjax" ] || fail "$dir exists and was not created by launch/; move it away."
    say "creating $dir again: the Python or the location changed"
    rm -rf "$dir" || fail "cannot remove $dir; remove it by hand."
  fi
  if [ ! -e "$dir/seerjax/identity" ]; then
    # Create the folder before the environment, so that an interrupted run is recognised as ours.
    mkdir -p "$dir/seerjax" || fail "cannot write in $ROOT; clone into a folder that you may write to."
    say "creating $dir with $python"
    "$python" -m venv "$dir" || fail "$python -m venv failed; SEERJAX_PYTHON names another Python."
    "$dir/bin/python" - "$ROOT" <<'EOF' || fail "cannot write in $dir."
import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "seerjax_checkout.pth").write_text(sys.argv[1] + "\n")
EOF
    printf '%s\n' "$identity" >"$dir/seerjax/identity"
  fi
  for lock in "$@"; do
    stamp="$dir/seerjax/$(basename "$lock")"
    [ "$(cat "$stamp" 2>/dev/null)" = "$(cksum <"$lock")" ] && continue
    pip_install "$dir" "$(grep -c '==' "$lock") packages of $(basename "$lock")" --no-deps -r "$lock" ||
      return 1
    cksum <"$lock" >"$stamp"
  done
}

# environment_of_generators DIR PYTHON MINOR: adds reasoning-gym to DIR; returns 1 if that fails.
environment_of_generators() {
  environment "$1" "$2" "$ROOT/launch/locks/environments-$3.txt" &&
    "$1/bin/python" -c 'import pycosat, reasoning_gym.factory' && return 0
  say "reasoning-gym cannot be used: its dependency pycosat is built from C source, which needs a C" \
    "compiler and Python's headers (apt install gcc python3-dev)"
  return 1
}

# pip_install DIR WHAT PIP_ARGUMENT...: runs pip quietly; prints its last lines if it fails.
pip_install() {
  local dir=$1 what=$2 started=$SECONDS log
  shift 2
  log="$dir/seerjax/pip.log"
  printf 'seerjax: installing %s ...' "$what" >&2
  if "$dir/bin/python" -m pip install --quiet --no-input --no-compile --disable-pip-version-check \
    "$@" >"$log" 2>&1; then
    printf ' %d s\n' $((SECONDS - started)) >&2
  else
    printf ' failed\n' >&2
    tail -n 15 "$log" >&2
    say "pip could not install $what; the full log is $log"
    return 1
  fi
}

# take_arguments OPTION... -- ARGUMENT...: parses the arguments of a script that starts a run.
#
# --OPTION=VALUE sets the variable OPTION, --dry-run `dry_run`, and --help prints `usage` and exits.
# The first argument that is not a flag, if it precedes the run's flags, is `name` (default: train);
# all others become `flags` of the run.
take_arguments() {
  local options=" " argument option
  while [ "$1" != -- ]; do
    options="$options$1 "
    shift
  done
  shift
  name="" dry_run=""
  flags=()
  for argument in "$@"; do
    option=${argument%%=*}
    option=${option#--}
    case $argument in
      --dry-run) dry_run=yes ;;
      --help | -h)
        usage
        exit 0
        ;;
      -*)
        case "$options|$argument" in
          *" $option "*"|--$option="*) printf -v "$option" '%s' "${argument#*=}" ;;
          *) flags+=("$argument") ;;
        esac
        ;;
      *)
        if [ -z "$name" ] && [ ${#flags[@]} -eq 0 ]; then name=$argument; else flags+=("$argument"); fi
        ;;
    esac
  done
  name=${name:-train}
}

# require_count OPTION VALUE EXAMPLE: fails unless the value is a positive whole number.
require_count() {
  case $2 in
    '' | *[!0-9]* | 0) fail "--$1: got '$2', expected a number of at least 1; write --$1=$3." ;;
  esac
}

# module_of NAME: sets `module`, the interpreter's arguments that run a command of seerjax (a name
# without a dot) or an experiment, and `file`, its source; fails if there is none.
module_of() {
  local kind
  case $1 in
    experiments.*)
      kind=experiment file="$ROOT/$(printf '%s' "$1" | tr . /).py"
      module=(-P -m "$1")
      ;;
    *)
      kind=command file="$ROOT/seerjax/commands/$1.py"
      module=(-P -m seerjax.commands "$1")
      ;;
  esac
  [ -f "$file" ] || fail "got the $kind '$1', expected one that exists ($file does not);" \
    "bash launch/local.sh --help lists them."
}

# free_port PYTHON: prints a free port of 127.0.0.1.
free_port() {
  "$1" -c \
    'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# detect_platform: prints cuda, tpu or cpu.
#
# /dev/vfio alone does not imply a TPU (any device can be passed through), so check the PCI vendor.
detect_platform() {
  local path
  if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    printf 'cuda\n'
    return
  fi
  for path in /dev/nvidia[0-9]*; do
    [ -e "$path" ] && printf 'cuda\n' && return
  done
  for path in /dev/accel[0-9]*; do
    [ -e "$path" ] && printf 'tpu\n' && return
  done
  if [ -d /dev/vfio ] && grep -qs '^0x1ae0' /sys/bus/pci/devices/*/vendor; then
    printf 'tpu\n'
    return
  fi
  printf 'cpu\n'
}

# platform_extra PLATFORM: prints the extra of JAX for PLATFORM; nothing for cpu.
#
# CUDA 13 needs driver 580 or newer; older and unknown drivers get CUDA 12.
platform_extra() {
  local driver
  case $1 in
    cpu) ;;
    tpu) printf 'tpu\n' ;;
    cuda)
      driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
      driver=${driver%%.*}
      case $driver in
        '' | *[!0-9]*) driver=0 ;;
      esac
      if [ "$driver" -ge 580 ]; then printf 'cuda13\n'; else printf 'cuda12\n'; fi
      ;;
    *) fail "--platform: got '$1', expected cpu, cuda or tpu; leave it out to detect it." ;;
  esac
}

# install_platform DIR LOCK EXTRA: installs JAX's plugin for EXTRA, at the lock's version of JAX.
install_platform() {
  local dir=$1 lock=$2 extra=$3 version
  [ -n "$extra" ] || return 0
  version=$(sed -n 's/^jax==//p' "$lock")
  [ "$(cat "$dir/seerjax/platform-$extra" 2>/dev/null)" = "$version" ] && return 0
  pip_install "$dir" "jax[$extra] $version" "jax[$extra]==$version" -c "$lock" || return 1
  printf '%s\n' "$version" >"$dir/seerjax/platform-$extra"
}

# export_platform DIR PLATFORM: sets JAX's platform, and its folder for compiled programs.
#
# The cache is in the environment: it needs no writable home, and is deleted with the environment.
export_platform() {
  case $2 in
    cpu)
      export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
      # By default glibc returns large buffers to the system at once, and XLA requests them again in
      # every step: page faults took a quarter of all time. Only the largest buffers (32 MiB is the
      # highest possible threshold) are returned: if kept, a train step's hundreds of MiB leave
      # holes that the next step does not fit, and peak memory grew by half. Huge pages make their
      # faults cheap. Other C libraries ignore these variables.
      export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-1}"
      export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"
      export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-17179869184}"
      export MALLOC_TOP_PAD_="${MALLOC_TOP_PAD_:-268435456}"
      export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
      ;;
    *) export JAX_PLATFORMS="${JAX_PLATFORMS:-$2,cpu}" ;;
  esac
  export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$1/seerjax/compiled}"
  export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0.2}"
}
