#!/usr/bin/env bash
# Runs inside an image that is built, before anything else: debian.sh [PACKAGE]...
# Puts in the certificates of the folder site/ (*.crt), which stay in the image, and installs Debian's
# packages. They come from where the image says; else from the sources in site/ (*.sources, *.list), or
# from DEBIAN_MIRROR, which has the folders of http://deb.debian.org (debian, debian-security).
set -euo pipefail
site=$(cd "$(dirname "$0")" && pwd)/site

if compgen -G "$site/*.crt" > /dev/null; then
  cp "$site"/*.crt /usr/local/share/ca-certificates/
  update-ca-certificates
fi
[ $# -gt 0 ] || exit 0

# A copy, so that the image names no mirror of the site that has built it.
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
mkdir "$sources/parts"
if compgen -G "$site/*.sources" > /dev/null || compgen -G "$site/*.list" > /dev/null; then
  find "$site" \( -name '*.sources' -o -name '*.list' \) -exec cp {} "$sources/parts" \;
else
  find /etc/apt/sources.list.d -type f -exec cp {} "$sources/parts" \;
  if [ -f /etc/apt/sources.list ]; then cp /etc/apt/sources.list "$sources/parts/image.list"; fi
  if [ -n "${DEBIAN_MIRROR:-}" ]; then
    sed -i -E "s#https?://(deb|security)\.debian\.org#${DEBIAN_MIRROR%/}#g" "$sources/parts"/*
  fi
fi
chmod -R a+rX "$sources" # apt reads them as a user of its own
options=(-o "Dir::Etc::sourcelist=/dev/null" -o "Dir::Etc::sourceparts=$sources/parts")
apt-get "${options[@]}" update
apt-get "${options[@]}" install --yes --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/*
