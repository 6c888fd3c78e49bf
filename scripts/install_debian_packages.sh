#!/usr/bin/env bash
# Installs Debian packages that are missing: scripts/install_debian_packages.sh PACKAGE...
#
# Tests that need one of them are skipped where it is missing, so where it cannot be installed, as
# without root, apt-get or a network, this says so and ends with status 0.
set -euo pipefail

say() { printf 'packages: %s\n' "$*" >&2; }

is_installed() {
    [[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

if (($# == 0)); then
    say "error: name the packages to install"
    exit 2
fi
if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "no apt-get here: $* not looked for; tests that need them may be skipped"
    exit 0
fi

missing=()
for package in "$@"; do
    is_installed "$package" || missing+=("$package")
done
((${#missing[@]})) || exit 0

as_root=()
if ((EUID != 0)); then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root=(sudo -n)
    else
        say "not root: tests that need ${missing[*]} are skipped; to have them:" \
            "sudo apt-get install ${missing[*]}"
        exit 0
    fi
fi

log="$(mktemp)"
trap 'rm -f -- "$log"' EXIT
apt() {
    # The lock: another run may be installing.
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2 "$@" >>"$log" 2>&1
}

say "installing ${missing[*]}"
# The lists may be old or, in containers, not there at all.
if apt install -y --no-install-recommends "${missing[@]}" ||
    { apt update && apt install -y --no-install-recommends "${missing[@]}"; }; then
    exit 0
fi
say "could not install ${missing[*]}; tests that need them may be skipped. The last lines:"
tail -n 5 -- "$log" >&2
