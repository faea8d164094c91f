#!/usr/bin/env bash
# Runs the master of a Mooncake cluster, the last tier of the KV pool, until it is stopped.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

usage() {
  cat <<'EOF'
usage: bash launch/mooncake_master.sh [--port=N] [--metrics_port=N]

Creates .venv in the checkout if needed, installs Mooncake in it, and runs one master until Ctrl-C.
Runs join it with --config.kv_pool.mooncake=HOST:PORT; each provides --config.kv_pool.store_bytes of
memory.

  --port=N           port that clients connect to (50051)
  --metrics_port=N   port that serves metrics of the cluster's use (9003)
EOF
}

port=50051 metrics_port=9003
for argument in "$@"; do
  case $argument in
    --port=*) port=${argument#*=} ;;
    --metrics_port=*) metrics_port=${argument#*=} ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail "got '$argument', expected --port=N or --metrics_port=N; see --help." ;;
  esac
done
for number in "$port" "$metrics_port"; do
  case $number in
    '' | *[!0-9]*) fail "got the port '$number', expected a number; write --port=50051." ;;
  esac
done

found=$(find_python)
minor=${found%% *}
environment "$ROOT/.venv" "${found#* }" "$ROOT/launch/locks/runtime-$minor.txt" \
  "$ROOT/launch/locks/mooncake-$minor.txt"
"$ROOT/.venv/bin/python" -c 'import mooncake.store' ||
  fail "Mooncake does not load; if libibverbs is missing: apt install libibverbs1"
say "the master listens on port $port; runs join with --config.kv_pool.mooncake=$(hostname):$port"
exec "$ROOT/.venv/bin/mooncake_master" --rpc_port "$port" --metrics_port "$metrics_port"
