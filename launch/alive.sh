#!/usr/bin/env bash
# Returns 0 if a run is alive, that is, if its status.json, written every ten seconds, is recent.
#
#   bash launch/alive.sh WORKDIR [SECONDS]      (120 seconds)
set -euo pipefail
file=${1:?WORKDIR: got nothing, expected the directory of a run}/status.json
[ -n "$(find "$file" -newermt "-${2:-120} seconds" 2>/dev/null)" ] || {
  echo "$file: got none that is younger than ${2:-120} s, expected a run that writes it" >&2
  exit 1
}
