#!/usr/bin/env bash
# Builds Transformer Engine into an environment that holds gpu.txt: transformer_engine.sh PYTHON
# Needs g++ and 10 to 30 minutes of two cores. CUDA's headers are those of the lock's wheels; its
# kernels come compiled, in transformer-engine-cu13, and only their binding to torch is built here.
set -euo pipefail
images=$(cd "$(dirname "$0")" && pwd)
requirements=$images/../requirements
python=$1

fail() {
  echo "transformer_engine: $1" >&2
  echo "  fix: $2" >&2
  exit 1
}

command -v g++ > /dev/null || fail "there is no g++" "install it (on Debian: apt-get install g++)"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[ -e "$site/nvidia/cu13/include/cuda_runtime.h" ] ||
  fail "the environment has no headers of CUDA 13" "install deployment/requirements/gpu.txt in it first"
export CUDA_HOME=$site/nvidia/cu13 CUDNN_PATH=$site/nvidia/cudnn NCCL_HOME=$site/nvidia/nccl
export CPATH=$CUDA_HOME/include:$CUDNN_PATH/include:$NCCL_HOME/include
export NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS:-$(nproc)}
PATH=$(dirname "$python"):$PATH:$CUDA_HOME/bin
uv=$(command -v uv || true)
[ -n "$uv" ] || fail "there is no uv" "install it: $python -m pip install uv"
# In an image, what the site's network asks for, as in install.sh.
if compgen -G "$images/site/*.crt" > /dev/null; then
  export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
fi
if [ -f "$images/site/pip.conf" ]; then export PIP_CONFIG_FILE=$images/site/pip.conf; fi
index=${PIP_INDEX_URL:-$("$python" -m pip config list | sed -n "s/^global.index-url='\(.*\)'\$/\1/p")}
if [ -n "$index" ]; then export UV_DEFAULT_INDEX=$index; fi

install() {
  "$uv" pip install --python "$python" --no-deps --no-build-isolation "$@"
}
# The binding last: its build reads the headers of the others.
grep -v '^transformer-engine-torch' "$requirements/transformer_engine.txt" > /tmp/pins.txt
install --requirements /tmp/pins.txt
rm -f /tmp/pins.txt
install "$(grep '^transformer-engine-torch' "$requirements/transformer_engine.txt")"
# Without the variables of the build, as stages run: with them it takes the wheels for a toolkit of the
# machine, whose libraries the loader knows, and does not load those that cuDNN consists of.
env -u CUDA_HOME -u CUDNN_PATH -u NCCL_HOME -u CPATH "$python" -W ignore -c '
from megatron.core.models.gpt import gpt_layer_specs
assert gpt_layer_specs.HAVE_TE, "Megatron-core does not find Transformer Engine"'
