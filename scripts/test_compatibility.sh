#!/usr/bin/env bash
# Test megatron_ext on releases of Megatron, one after the other, and print a table:
#   scripts/test_compatibility.sh [VERSION...]
# Without a VERSION: the last release of every supported series. Sources come from PyPI once and are
# kept in the cache; the environment is the same for all, with the version's sources first on the
# path. Takes some minutes per version. Exit status 1 if anything failed.
#
# Steps: doctor; hooks; RRFP and the collapse monitor; 2BW with checkpoints, also of Muon and of the
# distributed optimizer; patches, also with -m megatron_ext. All compare bit by bit.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$megatron_ext_repo"

export MEGATRON_EXT_EVERY_MEGATRON=1
scratch="$(mktemp -d)"
trap 'rm -rf -- "$scratch"' EXIT
results=() failed=0

# Run one step on a tree: step VERSION TREE TITLE COMMAND...
step() {
    local version="$1" tree="$2" title="$3" started=$SECONDS outcome=passed
    shift 3
    printf '\n== Megatron %s: %s\n' "$version" "$title"
    if ! PYTHONPATH="$tree:$PYTHONPATH" "$@"; then
        outcome=FAILED failed=1
    fi
    results+=("$(printf '%-8s  %-34s  %s  %d s' "$version" "$title" "$outcome" $((SECONDS - started)))")
}

test_version() {
    local version="$1" plain patched="$scratch/$1"
    plain="$(python -m tests.compatibility.sources "$version")" || {
        results+=("$version  not tested: its sources cannot be had") failed=1
        return
    }
    local pytest=(python -m pytest -q)
    step "$version" "$plain" "doctor" megatron-ext doctor --megatron "$plain"
    step "$version" "$plain" "hooks" "${pytest[@]}" tests/test_hooks.py
    step "$version" "$plain" "RRFP" "${pytest[@]}" tests/pipeline/test_stage.py -k "$rrfp"
    step "$version" "$plain" "2BW, and going on from checkpoints" "${pytest[@]}" \
        tests/pipedream_2bw/test_checkpoint.py -k "$two_versions"
    step "$version" "$plain" "collapse monitor" "${pytest[@]}" tests/collapse/test_training.py
    # These put the sources first on the path by themselves.
    step "$version" "$megatron_ext_repo" "patches" "${pytest[@]}" tests/compatibility -k "$version"
    cp -r -- "$plain" "$patched"
    scripts/apply_patches.sh --megatron "$patched"
    # But for the test of what is replaced: here the schedule is registered instead.
    step "$version" "$patched" "patched, with -m megatron_ext" "${pytest[@]}" \
        tests/test_hooks.py tests/collapse/test_training.py -k "not rebound"
    rm -rf -- "$patched"
}

rrfp="pp2-bf16 or pp2-dp2-distributed-optimizer or pp2-vpp2-dp2-bf16 or pp2-tp2 or per-token"
two_versions="adam or muon or distributed or refused"

versions=("$@")
if ((!$#)); then
    mapfile -t versions < <(
        python -c 'from tests.compatibility.sources import VERSIONS; print(*VERSIONS, sep="\n")'
    )
fi
for version in "${versions[@]}"; do test_version "$version"; done

printf '\n'
printf '%s\n' "${results[@]}"
exit $failed
