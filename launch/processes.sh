#!/usr/bin/env bash
# Creates the environment if needed, then runs a command as several processes on this machine, with
# all their devices in one mesh.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

usage() {
  cat <<'EOF'
usage: bash launch/processes.sh --num_processes=N [--logs=DIRECTORY] [--port=N] [--platform=cpu|cuda|tpu]
                                [--patience=SECONDS] [--dry-run] [COMMAND] [--flags]

Runs `seerjax COMMAND --flags`, or an experiment, as N processes of one slice: each takes its share of the
devices that --config.data_parallel_size and --config.tensor_parallel_size request, and all run one program
together, bit-identical to a single process. Without a name it runs the main job, train.

The first process prints here; the output of the others goes to files. Ctrl-C and SIGTERM stop all
processes after the current step; a second signal stops them at once. If a process dies, the others
are stopped, and --resume continues from the last checkpoint.

  --num_processes=N    number of processes
  --logs=DIRECTORY     directory for process_1.log and so on (runs/processes)
  --port=N             port on which the first process listens, on 127.0.0.1 (a free one)
  --patience=SECONDS   time for the others to end by themselves after one has died (30)
  --platform=P         platform (detected by default)
  --dry-run            prints what would be run, and does nothing
EOF
}

platform="" num_processes="" logs=runs/processes port="" patience=30
take_arguments num_processes logs port patience platform -- "$@"
require_count num_processes "$num_processes" 2
case $port in
  *[!0-9]*) fail "--port: got '$port', expected a number; write --port=9123, or leave it out." ;;
esac
case $patience in
  '' | *[!0-9]*) fail "--patience: got '$patience', expected whole seconds; write --patience=30." ;;
esac
module_of "$name"

platform=${platform:-$(detect_platform)}
extra=$(platform_extra "$platform")
found=$(find_python)
minor=${found%% *}
lock="$ROOT/launch/locks/runtime-$minor.txt"
python="$ROOT/.venv/bin/python"
if [ -z "$dry_run" ]; then
  environment "$ROOT/.venv" "${found#* }" "$lock"
  install_platform "$ROOT/.venv" "$lock" "$extra"
  export_platform "$ROOT/.venv" "$platform"
  [ -n "$port" ] || port=$(free_port "$python")
fi
slice=(--num_processes="$num_processes" --coordinator="127.0.0.1:${port:-FREE}")

if [ -n "$dry_run" ]; then
  for ((rank = 0; rank < num_processes; rank++)); do
    printf 'run %s\n' "$name${flags[*]+ ${flags[*]}} ${slice[*]} --process_id=$rank"
  done
  exit 0
fi

case $PWD/ in
  "$ROOT"/*) ;;
  *) export PYTHONPATH="$ROOT:${PYTHONPATH:-$PWD}" ;;
esac
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)

# Each runs in its own process group (`set -m`): signals of the terminal reach only this script,
# which forwards them, so that every process gets each signal exactly once.
pids=() stopped=""
pass_on() { for pid in ${pids[@]+"${pids[@]}"}; do kill "-$1" "$pid" 2>/dev/null || :; done; }
trap 'stopped=yes; pass_on INT' INT
trap 'stopped=yes; pass_on TERM' TERM
trap 'pass_on KILL' EXIT
set -m
for ((rank = 0; rank < num_processes; rank++)); do
  run=("$python" "${module[@]}" ${flags[@]+"${flags[@]}"} "${slice[@]}" --process_id="$rank")
  if [ "$rank" = 0 ]; then
    "${run[@]}" </dev/null &
  else
    "${run[@]}" </dev/null >"$logs/process_$rank.log" 2>&1 &
  fi
  pids+=($!)
done
set +m
say "$num_processes processes of $name; output of the others: $logs/process_*.log"

rank_of() {
  local rank
  for rank in "${!pids[@]}"; do [ "${pids[$rank]}" != "$1" ] || printf '%s' "$rank"; done
}

# The first non-zero status is this script's; the other processes then have `patience` seconds to
# end.
status=0 dead_at="" left=("${pids[@]}")
while [ ${#left[@]} -gt 0 ]; do
  still=()
  for pid in "${left[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then
      still+=("$pid")
      continue
    fi
    code=0
    wait "$pid" || code=$?
    if [ "$code" != 0 ] && [ "$status" = 0 ]; then
      status=$code dead_at=$SECONDS
      [ -n "$stopped" ] || say "process $(rank_of "$pid") ended with status $code; its lines and the" \
        "others' are here and in $logs"
    fi
  done
  left=(${still[@]+"${still[@]}"})
  [ ${#left[@]} -gt 0 ] || break
  if [ -n "$dead_at" ] && [ $((SECONDS - dead_at)) -ge "$patience" ]; then
    say "${#left[@]} of the others did not end within $patience s and are killed; --resume continues."
    for pid in "${left[@]}"; do kill -KILL "$pid" 2>/dev/null || :; done
    dead_at=$((SECONDS + 3600))
  fi
  sleep 0.2 || :
done
trap - EXIT
exit "$status"
