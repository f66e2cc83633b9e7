#!/usr/bin/env bash
# What the first hour on a GPU shows, in one report (tests/gpu/README.md):
#   deployment/first_gpu_run.sh [--python PYTHON] [--steps NAME,NAME...] [--report FILE]
# --python names the Python of an environment that has everything; by default the lock for GPUs is
# installed in .venv-gpu. The report has neither names of hosts and users nor the environment.
set -euo pipefail
caller=$PWD
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "first_gpu_run: $1" >&2
  echo "  fix: $2" >&2
  exit 2
}

all=(gpu compiler install doctor imports attention backends transfers turns run)
steps=("${all[@]}") python="" report=$caller/first_gpu_run.txt
while [ $# -gt 0 ]; do
  [ $# -gt 1 ] || fail "$1 is no option, or lacks its value" "give --python, --steps or --report and a value"
  case $1 in
    --python)
      python=$(cd "$caller" && type -P -- "$2") || fail "there is no Python $2" "give --python a program"
      [[ $python == /* ]] || python=$caller/$python
      ;;
    --steps) IFS=, read -ra steps <<< "$2" ;;
    --report) [[ $2 == /* ]] && report=$2 || report=$caller/$2 ;;
    *) fail "there is no option $1" "give --python, --steps or --report" ;;
  esac
  shift 2
done
for name in "${steps[@]}"; do
  [[ " ${all[*]} " == *" $name "* ]] || fail "there is no step $name" "take some of: ${all[*]}"
done

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export NEMO_RL_HOME=${NEMO_RL_HOME:-$logs/store} PYTHONPATH=$PWD PYTHONWARNINGS=ignore

gpus() {
  command -v nvidia-smi > /dev/null || { echo "there is no GPU: nvidia-smi was not found"; return 1; }
  nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version,compute_mode --format=csv
}
# Before the installation, which takes 10 GB: what Triton's kernels are compiled with.
compiler() {
  "${python:-$(plain_python)}" nemo_rl_core/maintenance/doctor/compiler.py
}
install() {
  local uv=.venv-gpu/bin/uv
  if [ -n "$python" ]; then
    "$python" -c 'import torch; print("given:", torch.__version__, torch.version.cuda)'
    return
  fi
  [ -x "$uv" ] || { "$(plain_python)" -m venv .venv-gpu && .venv-gpu/bin/python -m pip install -q uv==0.13.8; }
  "$uv" pip install --quiet --python .venv-gpu/bin/python --no-deps -r deployment/requirements/gpu.txt
  # For the commands nemo-rl and pyflyte; the lock's setuptools builds it.
  "$uv" pip install --quiet --python .venv-gpu/bin/python --no-deps --no-build-isolation --editable .
}
plain_python() {
  command -v python3.11 || command -v python3
}
tests() {
  "$run_python" -m pytest -n 0 -v -s -m gpu --timeout 600 "$@"
}
# Each FlashAttention that is installed is compared and timed; version 4 for this step alone.
attention() {
  local version_4=$logs/flash_attention_4
  "$run_python" -m pip install --quiet --no-deps --target "$version_4" \
    -r deployment/requirements/flash_attention_4.txt || echo "flash-attn-4 could not be installed"
  PYTHONPATH=$PWD:$version_4 tests tests/gpu/test_1_attention.py
}
# Not the program of that name, which is missing where this project is not installed.
nemo_rl() {
  "$run_python" -c 'from workflows.cli import main; main()' "$@"
}
three_steps() {
  local short=(grpo.num_iterations=1 grpo.num_steps_per_iteration=3)
  nemo_rl plan grpo_1.5b_1gpu "${short[@]}" || true
  nemo_rl run grpo grpo_1.5b_1gpu "${short[@]}"
}

# Runs a step; its output is for the report alone, but for the last line of one that fails.
step() {
  local name=$1 started=$SECONDS code=0
  shift
  [[ " ${steps[*]} " == *" $name "* ]] || return 0
  printf 'first_gpu_run: %-10s ' "$name"
  "$@" > "$logs/$name" 2>&1 || code=$?
  echo "$name $code $((SECONDS - started))" >> "$logs/steps"
  if [ $code = 0 ]; then echo "ok, $((SECONDS - started)) s"; else
    echo "exit code $code, $((SECONDS - started)) s: $(tail -n 1 "$logs/$name" | cut -c 1-160)"
  fi
  return $code
}
# Any Python writes the report, so that there is one of a failed installation too.
finish() {
  "$(plain_python)" deployment/first_gpu_report.py "$logs" "$report"
  echo "first_gpu_run: please send $report as an issue of this project; read it first, it is short"
}

: > "$logs/steps"
gpus > "$logs/gpus" 2>&1 || {
  step gpu gpus || true
  echo "first_gpu_run: $(tail -n 1 "$logs/gpus")" >&2
  echo "  fix: run it on a machine with an NVIDIA GPU and its driver (nvidia-smi lists it)" >&2
  exit 3
}
step gpu gpus
run_python=${python:-.venv-gpu/bin/python}
step compiler compiler || { finish; exit 1; }
step install install || { finish; exit 1; }
failed=0
step doctor nemo_rl doctor || failed=1
step imports "$run_python" -W ignore deployment/requirements/check_installed.py || failed=1
step attention attention || failed=1
step backends tests tests/gpu/test_1_backends.py || failed=1
step transfers tests tests/gpu/test_2_transfers.py || failed=1
step turns tests tests/gpu/test_3_one_gpu.py || failed=1
step run three_steps || failed=1
finish
exit $failed
