#!/usr/bin/env bash
# What a bare machine must be able to do: a Debian that debootstrap makes, with Python 3.11, git and
# make and neither a compiler nor anything else, runs commands in a clone of this commit.
#
#   tests/bare_debian.sh [COMMAND]...     default: make setup, and a run of the short recipe
#
# Needs root, debootstrap, and a machine whose package registries a chroot can reach.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD

[ "$(id -u)" -eq 0 ] || { echo "bare_debian: needs root" >&2; exit 2; }
command -v debootstrap > /dev/null || apt-get install -y -qq debootstrap > /dev/null
if [ $# -eq 0 ]; then set -- "make grpo CONFIG=workflows/recipes/grpo_ci.yaml"; fi

root=$(mktemp -d)
# The mounts live in a namespace of their own, which ends with it: only plain files are removed.
trap 'rm -rf --one-file-system "$root" "$root.log"' EXIT

mirror=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p; s/^deb \([^ ]*\) .*/\1/p' \
  /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null | head -n 1 || true)
quietly() {
  "$@" > "$root.log" 2>&1 || { tail -n 20 "$root.log" >&2; exit 1; }
}

echo "bare_debian: debootstrap"
quietly debootstrap --variant=minbase bookworm "$root" ${mirror:+"$mirror"}
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
quietly chroot "$root" apt-get install -y --no-install-recommends \
  python3.11 python3.11-venv git make ca-certificates
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
git clone -q "$repository" "$root/project"
folders=("${PIP_FIND_LINKS:-}")

unshare --mount --pid --fork bash -euc '
  root=$1; shift
  mount --make-rprivate /
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount --rbind -o ro /sys "$root/sys"
  for folder in $1; do mkdir -p "$root$folder"; mount --bind "$folder" "$root$folder"; done
  shift
  for command; do
    echo "bare_debian: $command"
    env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 ${PIP_FIND_LINKS:+PIP_FIND_LINKS="$PIP_FIND_LINKS"} \
      PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
      chroot "$root" bash -euc "cd /project; ! command -v cc gcc c++ g++; $command"
  done
' bash "$root" "${folders[*]}" "$@"
echo "bare_debian: passed"
