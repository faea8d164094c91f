#!/usr/bin/env bash
# Runs a command on all hosts of a TPU pod slice, one process per host.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

usage() {
  cat <<'EOF'
usage: bash launch/tpu_pod.sh --tpu=NAME --zone=ZONE --hosts=N [--directory=PATH] [--dry-run]
                              [COMMAND] [--flags]

Runs `bash launch/local.sh --platform=tpu COMMAND --flags` on every host of a TPU slice, by
`gcloud compute tpus tpu-vm ssh --worker=all`, as one run on all devices. Each host needs a
checkout at the same path; --workdir must be a directory that all hosts share, and data_parallel_size
times tensor_parallel_size must be the number of all chips. If a host dies, all stop; the same command with
--resume continues. This script has never run on a TPU; only the command that it builds is tested.

  --tpu=NAME        name of the slice
  --zone=ZONE       zone of the slice
  --hosts=N         number of hosts of the slice
  --directory=PATH  path of the checkout on each host (seerjax)
  --dry-run         prints what would be run, and does nothing
EOF
}

tpu="" zone="" hosts="" directory=seerjax
take_arguments tpu zone hosts directory -- "$@"
[ -n "$tpu" ] && [ -n "$zone" ] ||
  fail "got --tpu='$tpu', --zone='$zone', expected both; write --tpu=NAME --zone=ZONE."
require_count hosts "$hosts" 4
module_of "$name"

words=(bash launch/local.sh --platform=tpu "$name" ${flags[@]+"${flags[@]}"}
  --num_processes="$hosts" --launcher=gcetpu)
remote="cd $(printf '%q' "$directory") && exec$(printf ' %q' "${words[@]}")"
if [ -n "$dry_run" ]; then
  printf 'on every host: %s\n' "$remote"
  exit 0
fi
command -v gcloud >/dev/null ||
  fail "got no gcloud, expected Google Cloud's command line; install it and log in."
exec gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all --command="$remote"
