#!/usr/bin/env bash
# Pins cpu.in and gpu.in, with all they need, into cpu.txt and gpu.txt.
# The files name no package host and no path, so they mean the same on every machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=../..
source "$root/deployment/torch_source.sh"

lock() {
  local name=$1
  shift
  # What is pinned already stays, if it still fits: delete a file to have the newest of everything.
  if [ -f "$name.txt" ]; then cp "$name.txt" "$name.txt.new"; fi
  # Debian 12's Python, which is older than most of 3.11: a pin that needs a later one is of no use.
  "$root/.venv/bin/uv" pip compile "$name.in" --python-version 3.11.2 --quiet \
    --no-header --no-emit-index-url --no-emit-find-links --output-file "$name.txt.new" \
    --overrides overrides_common.txt "$@"
  sed -i "1i # Written by \`make lock\` from $name.in; edit that file instead." "$name.txt.new"
  mv "$name.txt.new" "$name.txt"
  echo "$name.txt: $(grep -c == "$name.txt") packages"
}

trap 'rm -f cpu.txt.new gpu.txt.new' EXIT
torch_source "$root/.venv/bin/python"
lock cpu --overrides overrides_cpu.txt "${TORCH_SOURCE[@]}"
lock gpu
if grep -nE '://|@ |/(home|root|opt|work|tmp)/' cpu.txt gpu.txt; then
  echo "a lock names a host or a path of this machine (above)" >&2
  exit 1
fi
