#!/usr/bin/env bash
# Runs an experiment on all hosts of a TPU pod slice, one process per host.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

usage() {
  cat <<'EOF'
usage: bash launch/tpu_pod.sh --tpu=NAME --zone=ZONE --hosts=N [--directory=PATH] [--dry-run]
                              [experiments.NAME] [--flags]

Runs `bash launch/local.sh --platform=tpu experiments.NAME --flags` on every host of a TPU slice, by
`gcloud compute tpus tpu-vm ssh --worker=all`, as one run on the devices of all. Each host needs a
checkout at the same path; --workdir has to be a directory that all of them see, and num_instances
times model_shards the number of all chips. When a host dies, all end; the same command with --resume
goes on. It never ran on a TPU; what is tested is the command that it makes.

  --tpu=NAME        of the slice
  --zone=ZONE       where it is
  --hosts=N         that it has
  --directory=PATH  of the checkout on each host (seerjax)
  --dry-run         says what would be run, and does nothing
EOF
}

tpu="" zone="" hosts="" directory=seerjax
take_arguments tpu zone hosts directory -- "$@"
[ -n "$tpu" ] && [ -n "$zone" ] ||
  fail "got --tpu='$tpu', --zone='$zone', expected both; write --tpu=NAME --zone=ZONE."
require_count hosts "$hosts" 4
require_experiment "$name"

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
