#!/usr/bin/env bash
# Returns 0 if a run is alive, that is, if its status.json, written every ten seconds, is recent.
#
#   bash launch/alive.sh WORKDIR [SECONDS]      (120 seconds)
set -euo pipefail
file=${1:?WORKDIR: got nothing, expected a run directory}/status.json
[ -n "$(find "$file" -newermt "-${2:-120} seconds" 2>/dev/null)" ] || {
  echo "$file: got no update for ${2:-120} s, expected a run that updates it" >&2
  exit 1
}
