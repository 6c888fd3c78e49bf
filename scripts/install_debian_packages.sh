#!/usr/bin/env bash
# Install packages of Debian where that can be done; those that are there already cost nothing:
#   scripts/install_debian_packages.sh slurm-wlm munge
# Exit status 1 if one is missing afterwards, with a line that says why.
set -euo pipefail

say() { printf 'install_debian_packages: %s\n' "$*" >&2; }

missing_of() {
    local package
    for package in "$@"; do
        [[ "$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)" == \
            installed ]] || printf '%s\n' "$package"
    done
}

if (($# == 0)); then
    say "error: which packages?"
    exit 2
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    say "not installed: $*: this is no Debian (no apt-get)"
    exit 1
fi
mapfile -t missing < <(missing_of "$@")
((${#missing[@]})) || exit 0
as_root=()
if [[ "$(id -u)" != 0 ]]; then
    if ! sudo -n true 2>/dev/null; then
        say "not installed: ${missing[*]}: neither root nor sudo without a password"
        exit 1
    fi
    as_root=(sudo -n)
fi
say "installing ${missing[*]}"
# env: sudo drops the variables of its caller. Another apt-get may be at work.
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
log="$(mktemp)"
trap 'rm -f -- "$log"' EXIT
if ! { "${apt[@]}" install -y --no-install-recommends "${missing[@]}" ||
    { "${apt[@]}" update &&
        "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; }; } >"$log" 2>&1 </dev/null
then
    tail -n 5 -- "$log" >&2
    say "not installed: ${missing[*]}: apt-get failed (its last lines are above)"
    exit 1
fi
