#!/usr/bin/env bash
# Creates the environment if needed, then runs a command of seerjax, or an experiment, on this machine.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

usage() {
  cat <<'EOF'
usage: bash launch/local.sh [--platform=cpu|cuda|tpu] [--dry-run] [COMMAND | experiments.NAME] [--flags]

Creates .venv in the checkout with the newest Python found (3.13, 3.12 or 3.11), installs the
locked versions, and runs `seerjax COMMAND --flags`, or an experiment. Without a name it runs the main
job, `seerjax train`. Later runs install nothing.

If a flag names a task reasoning_gym.GENERATOR, or an experiment always draws its tasks, that package
is installed too.

  --platform=P   platform (by default an NVIDIA GPU, a TPU, or else the CPU, as detected)
  --dry-run      prints what would be done, and does nothing
  --help         this text; after a name, its flags

  SEERJAX_PYTHON=/path/to/python           uses that interpreter
  JAX_COMPILATION_CACHE_DIR=/path          keeps compiled programs there, not in .venv
EOF
  local file
  printf '\ncommands:'
  # A command has a line in the table of commands.
  sed -n 's/^    "\([a-z]*\)": ".*",$/ \1/p' "$ROOT/seerjax/commands/__main__.py" | tr -d '\n'
  printf '\nexperiments:'
  # Experiments that are commands have this line in their docstring.
  while read -r file; do
    file=${file#"$ROOT/"}
    printf ' %s' "$(printf '%s' "${file%.py}" | tr / .)"
  done < <(grep -rl '^Command: ' --include='*.py' "$ROOT/experiments" 2>/dev/null | sort)
  printf '\n'
}

name="" platform="" dry_run=""
flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --platform=*) platform=${1#*=} ;;
    --platform)
      [ $# -gt 1 ] || fail "--platform: got nothing, expected cpu, cuda or tpu; write --platform=cpu."
      platform=$2
      shift
      ;;
    --dry-run) dry_run=yes ;;
    --help | -h)
      if [ -z "$name" ]; then
        usage
        exit 0
      fi
      flags+=("$1")
      ;;
    -*) flags+=("$1") ;;
    *)
      if [ -z "$name" ] && [ ${#flags[@]} -eq 0 ]; then name=$1; else flags+=("$1"); fi
      ;;
  esac
  shift
done

name=${name:-train}
module_of "$name"
# A checkout has problems of its own, with short names.
case $name in
  discover | check | report) flags=(--problems=experiments.problems.names:load ${flags[@]+"${flags[@]}"}) ;;
esac

platform=${platform:-$(detect_platform)}
extra=$(platform_extra "$platform")
found=$(find_python)
minor=${found%% *}
python=${found#* }
lock="$ROOT/launch/locks/runtime-$minor.txt"
generators=""
case " ${flags[*]-}" in *[\ =]reasoning_gym.*) generators=yes ;; esac
recipe=$(printf '%s\n' ${flags[@]+"${flags[@]}"} | sed -n 's/^--recipe=\([a-z_]*\)$/\1/p' | tail -n 1)
! grep -qs 'reasoning_gym\.' "$ROOT/seerjax/recipes/$recipe.py" || generators=yes
# Experiments that always draw its tasks have this line in their docstring.
! grep -q '^Needs: reasoning-gym$' "$file" || generators=yes

if [ -n "$dry_run" ]; then
  [ -z "$generators" ] || printf 'lock %s\n' "$ROOT/launch/locks/environments-$minor.txt"
  printf 'python %s\nlock %s\nplatform %s\nextra %s\nrun %s\n' \
    "$python" "$lock" "$platform" "${extra:-none}" "$name${flags[*]+ ${flags[*]}}"
  exit 0
fi

environment "$ROOT/.venv" "$python" "$lock"
[ -z "$generators" ] || environment_of_generators "$ROOT/.venv" "$python" "$minor" || exit 1
install_platform "$ROOT/.venv" "$lock" "$extra"
export_platform "$ROOT/.venv" "$platform"
say "Python $minor, JAX $(sed -n 's/^jax==//p' "$lock"), $platform; environment ready after $SECONDS s"

# Keep the working directory, so that relative paths in flags work; outside the checkout, modules in
# it (for example a user's task) can be imported, too.
case $PWD/ in
  "$ROOT"/*) ;;
  *) export PYTHONPATH="$ROOT:${PYTHONPATH:-$PWD}" ;;
esac
exec "$ROOT/.venv/bin/python" "${module[@]}" ${flags[@]+"${flags[@]}"}
