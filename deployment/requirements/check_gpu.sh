#!/usr/bin/env bash
# Installs gpu.txt into a scratch environment, as an image does, and checks it. It takes 10 GB and a
# few minutes, and no GPU. KEEP=folder leaves the environment there.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
venv=${KEEP:-$scratch/venv}
uv=.venv/bin/uv
export UV_CACHE_DIR=${UV_CACHE_DIR:-$scratch/cache} # whose files the environment links to
"$uv" venv --quiet --python .venv/bin/python "$venv"
"$uv" pip install --quiet --no-deps --python "$venv/bin/python" -r deployment/requirements/gpu.txt
PYTHONPATH=$PWD "$venv/bin/python" -W ignore deployment/requirements/check_installed.py
