#!/usr/bin/env bash
# Creates the environment if needed, starts Ray on this machine, and runs a command that samples
# on the workers of the cluster; each worker is a process with its own engine.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

usage() {
  cat <<'EOF'
usage: bash launch/cluster.sh --workers=N [--host=IP] [--port=N] [--num_cpus=N] [--logs=DIRECTORY]
                              [--store_bytes=N] [--platform=cpu|cuda|tpu] [--dry-run]
                              [COMMAND] [--flags]

Starts the head of a Ray cluster here, runs `seerjax COMMAND --flags`, or an experiment, with N
workers, and stops Ray afterwards. Without a name it runs the main job, train. A worker that dies is
replaced; this costs time but does not change results. Ctrl-C and SIGTERM stop the run after the
current step; a second signal stops it at once.

If Mooncake is installed in the environment (bash launch/mooncake_master.sh installs it) and --host is
left out, a Mooncake master is started too, and requests' keys and values move between workers through
memory that each worker provides. Without Mooncake, or if the run's own flags name a store, none is.

Other machines join with the command that the script prints first; each needs the same checkout at the
same path, with its environment. Workers on several machines have never been tested.

  --workers=N        number of sampling processes
  --host=IP          address at which other machines reach this one (127.0.0.1: none can)
  --port=N           port on which Ray listens (a free one)
  --num_cpus=N       maximum number of workers on this machine (all workers)
  --logs=DIRECTORY   directory for the logs of Ray, the master and the workers (runs/cluster)
  --store_bytes=N    bytes of memory that each worker provides (256 MiB); 0 starts no master
  --platform=P       platform (detected by default)
  --dry-run          prints what would be run, and does nothing
EOF
}

platform="" workers="" host=127.0.0.1 port="" num_cpus="" logs=runs/cluster
store_bytes=268435456
take_arguments workers host port num_cpus logs platform store_bytes -- "$@"
require_count workers "$workers" 2
num_cpus=${num_cpus:-$workers}
case $port$num_cpus in
  *[!0-9]*) fail "got --port='$port', --num_cpus='$num_cpus', expected numbers; leave them out." ;;
esac
case $store_bytes in
  '' | *[!0-9]*) fail "--store_bytes: got '$store_bytes', expected bytes, or 0 for no store." ;;
esac
module_of "$name"

platform=${platform:-$(detect_platform)}
extra=$(platform_extra "$platform")
found=$(find_python)
minor=${found%% *}
lock="$ROOT/launch/locks/runtime-$minor.txt"
python="$ROOT/.venv/bin/python"
if [ -z "$dry_run" ]; then
  environment "$ROOT/.venv" "${found#* }" "$lock" "$ROOT/launch/locks/cluster-$minor.txt"
  install_platform "$ROOT/.venv" "$lock" "$extra"
  export_platform "$ROOT/.venv" "$platform"
  [ -n "$port" ] || port=$(free_port "$python")
fi
address="$host:${port:-FREE}"
head=(-P -m ray.scripts.scripts start --head --block --node-ip-address="$host" --port="${port:-FREE}"
  --num-cpus="$num_cpus" --include-dashboard=false --disable-usage-stats)
run=("${module[@]}" ${flags[@]+"${flags[@]}"} --config.cluster.workers="$workers"
  --config.cluster.address="$address")
# Path of Mooncake's master executable; empty if it is not to be started.
master=""
case " ${flags[*]-}" in
  *" --config.kv_pool.mooncake="* | *" --config.kv_pool.disk="*) store_bytes=0 ;;
esac
if [ "$host" = 127.0.0.1 ] && [ "$store_bytes" != 0 ] && [ -x "$python" ]; then
  master=$("$python" -P -c '
import importlib.util, pathlib
import mooncake.store
print(pathlib.Path(importlib.util.find_spec("mooncake").origin).with_name("mooncake_master"))
' 2>/dev/null) || master=""
fi
store_port=FREE
if [ -n "$master" ]; then
  [ -n "$dry_run" ] || store_port=$(free_port "$python")
  run+=(--config.kv_pool.mooncake="127.0.0.1:$store_port" --config.kv_pool.store_bytes="$store_bytes")
fi
if [ -n "$dry_run" ]; then
  [ -z "$master" ] || printf 'mooncake_master --rpc_port %s\n' "$store_port"
  printf 'python %s\n' "${head[*]}" "${run[*]}"
  exit 0
fi

# Makes workers import the same modules as the run, including a user's task.
case $PWD/ in
  "$ROOT"/*) export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" ;;
  *) export PYTHONPATH="$ROOT:${PYTHONPATH:-$PWD}" ;;
esac
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
# For Ray's sockets, which limit the length of their paths to 107 bytes.
ray_files=$(mktemp -d /tmp/seerjax_ray.XXXXXX)

# The token of this cluster only; its holder can run anything on the cluster.
(umask 077 && "$python" -c 'import secrets; print(secrets.token_hex(32))' >"$logs/ray_token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$logs/ray_token"

# Both run in their own process groups (`set -m`): signals of the terminal reach only this script,
# which forwards them to the run; Ray ends after the run.
head_pid="" run_pid="" store_pid=""
pass_on() { [ -z "$run_pid" ] || kill "-$1" "$run_pid" 2>/dev/null || :; }
end_ray() {
  trap - EXIT
  pass_on KILL
  if [ -n "$head_pid" ]; then
    kill -TERM "$head_pid" 2>/dev/null || :
    for _ in $(seq 100); do
      kill -0 "$head_pid" 2>/dev/null || break
      sleep 0.2 || :
    done
    kill -KILL -- "-$head_pid" 2>/dev/null || :
  fi
  [ -z "$store_pid" ] || kill -TERM "$store_pid" 2>/dev/null || :
  cp "$ray_files"/session_latest/logs/worker-*.{out,err} "$logs" 2>/dev/null || :
  rm -rf "$ray_files" "$logs/ray_token"
}
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM
trap end_ray EXIT
set -m
if [ -n "$master" ]; then
  "$master" --rpc_port "$store_port" --metrics_port "$(free_port "$python")" </dev/null \
    >"$logs/mooncake.log" 2>&1 &
  store_pid=$!
fi
set +m
# Ray fails if it does not start within 30 s, for example on a loaded machine; so it is retried.
start_ray() {
  set -m
  "$python" "${head[@]}" --temp-dir="$ray_files" </dev/null >"$logs/ray.log" 2>&1 &
  head_pid=$!
  set +m
}
tries=3
start_ray
until grep -q "Ray runtime started" "$logs/ray.log"; do
  if ! kill -0 "$head_pid" 2>/dev/null; then
    kill -KILL -- "-$head_pid" 2>/dev/null || :
    tries=$((tries - 1))
    if [ "$tries" = 0 ] || ! grep -q "timed out during startup" "$logs/ray.log"; then
      fail "Ray has not started; see $logs/ray.log."
    fi
    say "Ray has not started within 30 s; starting it again"
    start_ray
  fi
  sleep 0.2 || :
done
[ -z "$store_pid" ] || kill -0 "$store_pid" 2>/dev/null ||
  fail "Mooncake's master has ended; see $logs/mooncake.log; --store_bytes=0 runs without it."
say "Ray listens at $address; other machines join, with a copy of $logs/ray_token, by" \
  "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=COPY ray start --address=$address"
set -m
"$python" "${run[@]}" </dev/null &
run_pid=$!
set +m
status=0
while :; do
  wait "$run_pid" && status=0 || status=$?
  kill -0 "$run_pid" 2>/dev/null || break # Else a signal only interrupted `wait`.
done
run_pid=""
exit "$status"
