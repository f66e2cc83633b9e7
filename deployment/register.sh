#!/usr/bin/env bash
# Registers every workflow, stage and launch plan on a Flyte cluster, with the code of this checkout:
#   deployment/register.sh --config FLYTE_CONFIG [--project P] [--domain D] [--activate PLAN]...
#   deployment/register.sh --package FILE.tgz       writes what would be registered, and stops
# No launch plan of workflows/launch_plans.py is active before --activate names it.
# NEMO_RL_REGISTRY: where the cluster pulls images from; NEMO_RL_NOTIFY: addresses for Flyte's mail.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

bin=.venv/bin config='' project=nemo-rl domain=development package='' activate=()
plans=$(sed -n 's/^\([a-z_]*\) = LaunchPlan\.create($/\1/p' workflows/launch_plans.py | paste -sd' ')

fail() {
  printf 'register: %s\n' "$@" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  case $1 in
    --activate)
      # All of them would start runs of the examples' recipes, too.
      [[ $# -ge 2 && $2 != *" "* && " $plans " == *" $2 "* ]] ||
        fail "--activate needs the name of a launch plan" "  expected: one of $plans" \
          "  got: ${2:-none}" "  fix: --activate nightly_collection, which frees the volume" ;;
    --config | --project | --domain | --package) [ $# -ge 2 ] || fail "$1 needs a value" ;;
    *) fail "unknown option $1" "  expected: --config, --project, --domain, --package or --activate" ;;
  esac
  case $1 in
    --activate) activate+=("$2") ;;
    --config) config=$2 ;;
    --project) project=$2 ;;
    --domain) domain=$2 ;;
    --package) package=$2 ;;
  esac
  shift 2
done

changes() {
  git diff HEAD
  git ls-files --others --exclude-standard -z | sort -z | xargs -0 -r sha256sum
}

# Equal code has an equal version: registering twice changes nothing.
version=$(git rev-parse --short=12 HEAD)
if [ -n "$(git status --porcelain)" ]; then
  version="$version-$(changes | sha256sum | cut -c 1-8)"
fi
# Every task names its own image; flytekit asks for one more, which nothing runs in.
images=(--image "unused=${NEMO_RL_REGISTRY:+$NEMO_RL_REGISTRY/}nemo-rl-unused:0")
# Where the code is unpacked: the images' user may not write flytekit's default, /root.
folder=/home/nemo

# All that git does not ignore is uploaded, and every stage reads it.
"$bin/python" -m tasks.flyte.code_secrets .

if [ -n "$package" ]; then
  [ -n "${NEMO_RL_REGISTRY:-}" ] ||
    echo "register: NEMO_RL_REGISTRY is not set: only a sandbox finds images without a registry" >&2
  "$bin/pyflyte" --pkgs workflows package --copy all --force "${images[@]}" \
    --in-container-source-path "$folder" --output "$package"
  exit
fi
[ -f "$config" ] || fail "there is no configuration ${config:-(none given)}" \
  "  expected: --config deployment/sandbox/flyte.yaml or one of your own"
"$bin/python" -m tasks.pods.registry "$config"
"$bin/pyflyte" --config "$config" register --project "$project" --domain "$domain" \
  --version "$version" --copy all --destination-dir "$folder" "${images[@]}" workflows
echo "register: version $version in $project/$domain"
for plan in ${activate[@]+"${activate[@]}"}; do  # bash 3.2 calls an empty one unbound
  "$bin/pyflyte" --config "$config" launchplan --project "$project" --domain "$domain" \
    --activate "$plan" "$version"
done
