#!/usr/bin/env bash
# Builds the images that stages are registered with, and pushes them where NEMO_RL_REGISTRY is set:
#   deployment/images/build.sh [training|generation|laptop|light]...
# PYTHON_IMAGE names the image that they begin with; pin it by digest for a production cluster.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."

if ! command -v docker > /dev/null; then
  echo "build: docker was not found" >&2
  echo "  fix: install docker (or podman with a docker command), and start it" >&2
  exit 1
fi

# KIND DOCKERFILE NAME, a line each
.venv/bin/python -m tasks.platform.images | while read -r kind dockerfile name; do
  if [ $# -gt 0 ] && [[ " $* " != *" ${kind#nemo-rl-} "* ]]; then continue; fi
  echo "build: $name"
  docker build --file "$dockerfile" --tag "$name" \
    ${PYTHON_IMAGE:+--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE"} . < /dev/null
  if [ -n "${NEMO_RL_REGISTRY:-}" ]; then docker push "$name" < /dev/null; fi
done
