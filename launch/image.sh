#!/usr/bin/env bash
# Creates the environment in a container image, from a checkout that was copied into it.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

usage() {
  cat <<'EOT'
usage: bash launch/image.sh [--platform=cpu|cuda12|cuda13|tpu] [--cluster]

Creates .venv in the checkout with the newest Python found and the locked versions, checks that the
library runs there, and removes everything that a container does not need. This is all that
launch/Dockerfile does; it needs no device.

  --platform=P   platform of the image's containers (cpu)
  --cluster      include Ray, for launch/gke/rayjob.yaml
  --help         this text
EOT
}

platform=cpu cluster=""
for argument in "$@"; do
  case $argument in
    --platform=cpu | --platform=cuda12 | --platform=cuda13 | --platform=tpu)
      platform=${argument#*=}
      ;;
    --platform=*) fail "--platform: got '${argument#*=}', expected cpu, cuda12, cuda13 or tpu." ;;
    --cluster) cluster=yes ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) fail "got '$argument', expected --platform=P or --cluster; see --help." ;;
  esac
done

cd "$ROOT"
found=$(find_python)
minor=${found%% *}
python="$ROOT/.venv/bin/python"
lock="launch/locks/runtime-$minor.txt"
locks=("$lock")
[ -z "$cluster" ] || locks+=("launch/locks/cluster-$minor.txt")
environment "$ROOT/.venv" "${found#* }" "${locks[@]}"
[ "$platform" = cpu ] || install_platform "$ROOT/.venv" "$lock" "$platform"
# Layers of an image are read-only at run time: compile byte code now, for what a run imports.
unset PYTHONDONTWRITEBYTECODE
JAX_PLATFORMS=cpu "$python" -P -c '
import jax, seerjax
for name in seerjax.__all__:
  getattr(seerjax, name)
print(f"image: seerjax {seerjax.__version__}, JAX {jax.__version__}")'
