#!/usr/bin/env bash
# Fills in the variables of a file, ${NAME}, from the environment, as envsubst does, and refuses to
# leave one empty:  deployment/fill.sh deployment/production/cluster.yaml | kubectl apply ...
# Other words with a dollar stay as they are: scripts in a ConfigMap, Helm's own templates.
set -euo pipefail

if [[ $# -ne 1 || ! -f $1 ]]; then
  echo "usage: ${BASH_SOURCE[0]} FILE" >&2
  exit 2
fi
if ! command -v envsubst > /dev/null; then
  echo "envsubst is missing: install the package gettext (Debian: gettext-base)" >&2
  exit 1
fi

# Of comments, none counts.
mapfile -t names < <(sed 's/^ *#.*//' "$1" | grep -oE '\$\{[A-Z_][A-Z0-9_]*\}' | tr -d '${}' | sort -u)
missing=()
for name in "${names[@]}"; do
  [[ -n ${!name-} ]] || missing+=("$name")
done
if ((${#missing[@]})); then
  echo "$1 is not filled in" >&2
  echo "  expected: ${names[*]} in the environment (docs/cluster-setup.md has what each is)" >&2
  echo "  got: nothing for ${missing[*]}" >&2
  echo "  fix: export ${missing[0]}=…, and the same for each" >&2
  exit 1
fi
envsubst "$(printf '${%s} ' "${names[@]}")" < "$1"
