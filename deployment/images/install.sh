#!/usr/bin/env bash
# Runs inside an image that is built, and installs there what a lock pins:
#   install.sh LOCK [--without PACKAGE]...
# The folder site/ beside it may hold what this machine's network asks for: certificates (*.crt, which
# debian.sh has put in), wheels (*.whl), and a pip.conf with the package index.
set -euo pipefail
images=$(cd "$(dirname "$0")" && pwd)
requirements=$images/../requirements
lock=$1
shift

if compgen -G "$images/site/*.crt" > /dev/null; then
  export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_CERT=/etc/ssl/certs/ca-certificates.crt
fi
if [ -f "$images/site/pip.conf" ]; then export PIP_CONFIG_FILE=$images/site/pip.conf; fi
if compgen -G "$images/site/*.whl" > /dev/null; then export PIP_FIND_LINKS=$images/site; fi

pip install --no-cache-dir --disable-pip-version-check uv==0.13.8
options=()
# `pip config get` reads no file that PIP_CONFIG_FILE names; `list` does.
index=${PIP_INDEX_URL:-$(pip config list | sed -n "s/^global.index-url='\(.*\)'\$/\1/p")}
if [ -n "$index" ]; then options+=(--default-index "$index"); fi
if [ "$lock" = cpu.txt ]; then
  source "$images/../torch_source.sh"
  torch_source python3
  options+=("${TORCH_SOURCE[@]}")
fi
python3 "$requirements/pins.py" "$requirements/$lock" "$@" > /tmp/pins.txt
uv pip install --system --no-cache --compile-bytecode --no-deps --requirements /tmp/pins.txt \
  "${options[@]}"
rm -f /tmp/pins.txt
