#!/usr/bin/env bash
# Builds the images that stages are registered with, and pushes them where NEMO_RL_REGISTRY is set:
#   deployment/images/build.sh [--missing] [training|generation|laptop|light]... [-- OPTION...]
# --missing leaves out what the registry has: a name stands for one content.
# PYTHON_IMAGE names the image that they begin with; pin it by digest for a production cluster.
# DEBIAN_MIRROR, PIP_INDEX_URL and the folder site/ say where packages come from (docs/clusters.md).
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
images=$(.venv/bin/python -m tasks.platform.images) # KIND DOCKERFILE NAME, a line each
for kind in "${wanted[@]}"; do
  grep -q "^nemo-rl-$kind " <<< "$images" ||
    fail "there is no image $kind" "take some of $(cut -d ' ' -f 1 <<< "$images" | cut -d - -f 3 | xargs)"
done

while read -r kind dockerfile name; do
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" ${kind#nemo-rl-} "* ]]; then continue; fi
  if [ -n "$missing" ] && "$builder" manifest inspect "$name" < /dev/null &> /dev/null; then
    echo "build: $name is there"
    continue
  fi
  echo "build: $name"
  "$builder" build --file "$dockerfile" --tag "$name" \
    ${PYTHON_IMAGE:+--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE"} \
    ${DEBIAN_MIRROR:+--build-arg "DEBIAN_MIRROR=$DEBIAN_MIRROR"} \
    ${PIP_INDEX_URL:+--build-arg "PIP_INDEX_URL=$PIP_INDEX_URL"} "$@" deployment < /dev/null
  if [ -n "${NEMO_RL_REGISTRY:-}" ]; then "$builder" push "$name" < /dev/null; fi
done <<< "$images"
