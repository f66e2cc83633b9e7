#!/usr/bin/env bash
# Puts Chromium in place for the browser tests: quiet where it is there, Debian's where it is not.
set -euo pipefail

browser=/usr/bin/chromium
[ -x "$browser" ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
  echo "the browser tests need $browser: install it, as root: apt-get install chromium" >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null
