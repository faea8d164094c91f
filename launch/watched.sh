#!/usr/bin/env bash
# Runs a command that is a run, and ends it if it hangs: if its status.json, written every ten
# seconds, was updated by this run, but not recently. Returns 75 then, and the command's status
# otherwise.
#
#   bash launch/watched.sh WORKDIR COMMAND...
#
#   SEERJAX_HANGS_AFTER=N    seconds (600)
#   SEERJAX_LOOKS_EVERY=N    seconds (30)
set -uo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
workdir=${1:?WORKDIR: got nothing, expected a run directory}
shift
after=${SEERJAX_HANGS_AFTER:-600}

began=$(mktemp) || exit 1
"$@" &
run=$!
trap 'kill -TERM "$run" 2>/dev/null' TERM
trap 'kill -INT "$run" 2>/dev/null' INT
(
  while sleep "${SEERJAX_LOOKS_EVERY:-30}"; do
    # Ignore the status of an earlier run.
    [ "$workdir/status.json" -nt "$began" ] || continue
    if ! bash "$here/alive.sh" "$workdir" "$after"; then
      echo hung >"$began"
      kill -TERM "$run"
      sleep 20
      kill -KILL "$run"
    fi
  done
) >/dev/null 2>&1 &
watching=$!
status=0
while kill -0 "$run" 2>/dev/null; do
  wait "$run" # Returns when the run ends or a signal arrives.
  status=$?
done
kill "$watching" 2>/dev/null
if [ -s "$began" ]; then
  echo "watched: got no status from $workdir for $after s, expected one every 10 s; the run was stopped" >&2
  status=75
fi
rm -f "$began"
exit "$status"
