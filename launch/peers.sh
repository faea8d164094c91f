#!/usr/bin/env bash
# Installs packages that experiments compare with: llama.cpp next to our own packages, and
# transformers with torch for Python 3.11, for which a CPU build is locked. Nothing else needs them.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

case ${1:-} in
  "") ;;
  --help | -h)
    cat <<'EOF'
usage: bash launch/peers.sh

Installs llama.cpp in .venv. If this machine has Python 3.11, also creates .venv-3.11 with
transformers on a CPU build of torch, the packages of its server, and TRL. experiments.throughput.engine,
experiments.throughput.real and experiments.throughput.server find both; experiments.invariance.real and
experiments.learning.step take --python=.venv-3.11/bin/python.
EOF
    exit 0
    ;;
  *) fail "got '$1', expected no argument; see --help." ;;
esac

found=$(find_python)
environment "$ROOT/.venv" "${found#* }" \
  "$ROOT/launch/locks/runtime-${found%% *}.txt" "$ROOT/launch/locks/llama.txt" ||
  say "llama.cpp is left out: its wheel is only for x86-64 Linux"
if found=$(find_python 3.11); then
  environment "$ROOT/.venv-3.11" "${found#* }" \
    "$ROOT/launch/locks/runtime-3.11.txt" "$ROOT/launch/locks/parity-3.11.txt" \
    "$ROOT/launch/locks/transformers-serve-3.11.txt" "$ROOT/launch/locks/trl-3.11.txt" ||
    say "transformers is left out: no CPU build of torch could be installed"
else
  say "transformers is left out: a CPU build of torch is locked only for Python 3.11"
fi
