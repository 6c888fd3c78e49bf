#!/usr/bin/env bash
# Put the patches of this megatron_ext into a Megatron, or take them out again:
#   scripts/apply_patches.sh --megatron DIR            apply
#   scripts/apply_patches.sh --megatron DIR --check    only say whether they are in, or would go in
#   scripts/apply_patches.sh --megatron DIR --reverse  take them out
# DIR holds the folder megatron: a Megatron-LM checkout, or an unpacked sdist or wheel. Which
# patches fit is read from its version. Nothing is changed unless all of them go in, or come out.
# Exit status: 0 done, or done before; 1 the patches do not fit, or with --check are not in; 2 the
# question is wrong.
set -euo pipefail

repo="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"

die() {
    local status="$1"
    shift
    printf 'apply_patches: error: %s\n' "$*" >&2
    exit "$status"
}

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }

megatron="" action=apply
while (($#)); do
    case "$1" in
        --megatron)
            (($# > 1)) || die 2 "--megatron needs a folder"
            megatron="$2"
            shift
            ;;
        --megatron=*) megatron="${1#*=}" ;;
        --check | --reverse)
            [[ $action == apply ]] || die 2 "give --check or --reverse, not both"
            action="${1#--}"
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) die 2 "unknown argument $1; --help shows the usage" ;;
    esac
    shift
done

[[ -n $megatron ]] || die 2 "say which Megatron: --megatron DIR"
info="$megatron/megatron/core/package_info.py"
[[ -f $info ]] || die 2 "--megatron $megatron: no megatron/core/package_info.py in it"
command -v git >/dev/null || die 2 "the git command is needed, also outside a repository"
megatron="$(cd -- "$megatron" && pwd -P)"

# The number that a line such as "MINOR = 19" gives.
number() { sed -n "s/^$1 *= *\([0-9]\{1,\}\).*/\1/p" "$megatron/megatron/core/package_info.py"; }

version="$(number MAJOR).$(number MINOR)"
patches=("$repo/patches/megatron-core-$version"/*.patch)
if [[ ! -f ${patches[0]} ]]; then
    known=("$repo"/patches/megatron-core-*/)
    known=("${known[@]%/}")
    known=("${known[@]##*-}")
    die 2 "$megatron is Megatron $version.$(number PATCH); there are patches for ${known[*]}"
fi

# Git looks for a repository in DIR, but not above it: paths in patches are relative to DIR.
export GIT_CEILING_DIRECTORIES="${megatron%/*}"
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE

# All patches as one, so that git takes all or nothing.
run_git_apply() {
    (
        cd -- "$megatron"
        cat -- "${patches[@]}" |
            git -c core.autocrlf=false -c apply.whitespace=nowarn apply "$@"
    )
}

# The first reason that git gives, in one line.
reason() { run_git_apply --check "$@" 2>&1 | sed -n '/^error: /{s///p;q}' || true; }

if run_git_apply --check --reverse 2>/dev/null; then state=in
elif run_git_apply --check 2>/dev/null; then state=out
else state=neither; fi

name="Megatron $version in $megatron"
case "$action-$state" in
    apply-in) echo "already applied: $name" ;;
    apply-out)
        if git -C "$megatron" rev-parse --git-dir >/dev/null 2>&1 &&
            [[ -n "$(git -C "$megatron" status --porcelain --untracked-files=no)" ]]; then
            die 1 "$megatron has uncommitted changes: commit or stash them, then run this again"
        fi
        run_git_apply || die 1 "$name: git could not write all of it (its reason is above)"
        echo "applied ${#patches[@]} patches: $name"
        ;;
    reverse-in)
        run_git_apply --reverse || die 1 "$name: git could not write all of it (its reason is above)"
        echo "reversed ${#patches[@]} patches: $name"
        ;;
    reverse-out) echo "not applied: $name" ;;
    check-in) echo "applied: $name" ;;
    check-out)
        echo "not applied, would fit: $name"
        exit 1
        ;;
    reverse-neither)
        die 1 "$name has only some of the patches, or its copy was edited: $(reason --reverse)"
        ;;
    *)
        die 1 "$name differs where the patches go (edited, or patched in part): $(reason)"
        ;;
esac
