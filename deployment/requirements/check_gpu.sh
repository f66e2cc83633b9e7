#!/usr/bin/env bash
# Installs gpu.txt into a scratch environment, as an image does, and checks it. It takes 10 GB and a
# few minutes, and no GPU.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
uv=.venv/bin/uv
"$uv" venv --quiet --python .venv/bin/python "$scratch/venv"
"$uv" pip install --quiet --no-deps --python "$scratch/venv/bin/python" \
  -r deployment/requirements/gpu.txt
PYTHONPATH=$PWD "$scratch/venv/bin/python" deployment/requirements/check_installed.py
