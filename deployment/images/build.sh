#!/usr/bin/env bash
# Builds the images that stages are registered with, and pushes them where NEMO_RL_REGISTRY is set:
#   deployment/images/build.sh [--missing] [light|laptop|generation|training]... [-- OPTION...]
# --missing leaves out what the registry has, and pushes what this machine has: a name stands for one content.
# arguments.txt names the image that they begin with, and what else is another than in their Dockerfiles.
# DEBIAN_MIRROR, PIP_INDEX_URL and the folder site/ say where packages come from (docs/docker.md).
# Options after `--` are those of the program that builds: NEMO_RL_BUILDER, else docker, else podman.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."

wanted=() missing=''
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  if [ "$1" = --missing ]; then missing=yes; else wanted+=("$1"); fi
  shift
done
[ $# -eq 0 ] || shift

fail() {
  echo "build: $1" >&2
  echo "  fix: $2" >&2
  exit 1
}

builder=$(command -v ${NEMO_RL_BUILDER:-docker podman} | head -n 1 || true)
[ -n "$builder" ] ||
  fail "no ${NEMO_RL_BUILDER:-docker and no podman} was found" "install docker or podman"
[ -x .venv/bin/python ] || fail "there is no .venv, whose Python names the images" "make setup"
images=$(.venv/bin/python -m tasks.pods.images) # KIND DOCKERFILE NAME [ARGUMENT=VALUE]..., a line each
for kind in "${wanted[@]}"; do
  grep -q "^nemo-rl-$kind " <<< "$images" ||
    fail "there is no image $kind" "take some of $(cut -d ' ' -f 1 <<< "$images" | cut -d - -f 3 | xargs)"
done

# What only the build knew, the registration would not name.
for word in "PYTHON_IMAGE=${PYTHON_IMAGE:-}" "$@"; do
  if [[ $word =~ (PYTHON_IMAGE|TRANSFORMER_ENGINE)=.+ ]]; then
    fail "${BASH_REMATCH[0]} would be in the image, and not in its name" \
      "write ${BASH_REMATCH[0]} to deployment/images/arguments.txt, which the registration reads, too"
  fi
done
options=()
# podman takes a step from its cache although a file that the step reads has changed, such as a lock.
if [[ $("$builder" --version) == podman* ]]; then options+=(--no-cache); fi

while read -r kind dockerfile name arguments; do
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" ${kind#nemo-rl-} "* ]]; then continue; fi
  if [ -n "$missing" ] && "$builder" manifest inspect "$name" < /dev/null &> /dev/null; then
    echo "build: $name is there"
    continue
  fi
  if [ -n "$missing" ] && "$builder" image inspect "$name" < /dev/null &> /dev/null; then
    echo "build: $name is on this machine"
  else
    echo "build: $name"
    # shellcheck disable=SC2086 # arguments are words
    "$builder" build --file "$dockerfile" --tag "$name" ${options[@]+"${options[@]}"} \
      ${arguments:+$(printf ' --build-arg %s' $arguments)} \
      ${DEBIAN_MIRROR:+--build-arg "DEBIAN_MIRROR=$DEBIAN_MIRROR"} \
      ${PIP_INDEX_URL:+--build-arg "PIP_INDEX_URL=$PIP_INDEX_URL"} "$@" deployment < /dev/null
  fi
  if [ -n "${NEMO_RL_REGISTRY:-}" ]; then
    "$builder" push "$name" < /dev/null ||
      fail "$name is built, and the registry does not take it" \
        "log in (${builder##*/} login ${NEMO_RL_REGISTRY%%/*}), make its repository where the registry \
makes none by itself (as ECR), and go on with --missing"
  fi
done <<< "$images"
