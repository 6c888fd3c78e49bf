# shellcheck shell=bash
# Makes or reuses the virtual environment; sourced by the other scripts, not run.
#
# The environment is .venv in the repository, or where MEGATRON_EXT_VENV points. Afterwards
# megatron_ext_repo is set, the environment's programs come first in PATH, and Python imports
# megatron_ext from this checkout. On failure the calling script ends with one line that says why.

megatron_ext_repo="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
megatron_ext_venv="${MEGATRON_EXT_VENV:-$megatron_ext_repo/.venv}"
[[ $megatron_ext_venv == /* ]] || megatron_ext_venv="$PWD/$megatron_ext_venv"
unset PYTHONHOME

_say() { printf 'environment: %s\n' "$*" >&2; }

_die() {
    _say "error: $*"
    exit 1
}

# Print what a candidate is: "ok PATH", or the version of a Python without the venv module.
# A candidate that is no working Python, such as a version manager's stub, prints nothing. Pyenv's
# stubs go by .python-version in the current directory, unless PYENV_VERSION names another one.
_inspect_python() {
    (cd -- "$megatron_ext_repo" && unset PYENV_VERSION && "$1" -I - 2>/dev/null) <<'PYTHON'
import importlib.util
import sys

version = sys.version_info[:2]
if (3, 12) <= version < (3, 14):
    has_venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
    print(f"ok {sys.executable}" if has_venv else "%d.%d" % version)
PYTHON
}

_find_python() {
    local name candidate answer without_venv=""
    for name in python3.12 python3.13 python3 python; do
        while IFS= read -r candidate; do
            answer="$(_inspect_python "$candidate")" || continue
            case "$answer" in
                "ok "*)
                    printf '%s\n' "${answer#ok }"
                    return
                    ;;
                ?*) without_venv="${without_venv:-$candidate is Python $answer}" ;;
            esac
        done < <(type -aP "$name")
    done
    if [[ -n $without_venv ]]; then
        _die "$without_venv but lacks the venv module; install it, for example python3.12-venv"
    fi
    _die "Python 3.12 or 3.13 is needed and none works in PATH" \
        "(tried python3.12, python3.13, python3, python); install one and run this again"
}

# Make the environment unless it has a working Python; one whose Python is gone is replaced, all
# but the lock file named in $1.
_ensure_python() {
    local own="$megatron_ext_venv/bin/python" python
    if ! "$own" -I -c '' 2>/dev/null; then
        python="$(_find_python)" || exit 1
        _say "making $megatron_ext_venv with $python"
        find "$megatron_ext_venv" -mindepth 1 -maxdepth 1 ! -name "$1" -exec rm -rf {} +
        "$python" -I -m venv "$megatron_ext_venv" ||
            _die "$python cannot make $megatron_ext_venv (its reason is above)"
    elif [[ "$(_inspect_python "$own")" != "ok "* ]]; then
        _die "$megatron_ext_venv is not of Python 3.12 or 3.13; remove it, or point" \
            "MEGATRON_EXT_VENV at another directory"
    fi
    # Missing in environments that other tools made, and after an interruption.
    "$own" -I -m pip --version >/dev/null 2>&1 || "$own" -I -m ensurepip >&2 ||
        _die "$megatron_ext_venv has no pip; remove it and run this again"
}

# pip takes a package for installed when its metadata is there; the metadata of one whose
# installation was interrupted lacks INSTALLER, which pip writes last.
_remove_half_installed() {
    local metadata
    for metadata in "$megatron_ext_venv"/lib/python*/site-packages/*.dist-info; do
        if [[ -d $metadata && ! -e $metadata/INSTALLER ]]; then
            _say "removing half-installed $(basename -- "$metadata")"
            rm -rf -- "$metadata"
        fi
    done
}

# Whether megatron_ext is installed in editable mode from this checkout.
_points_here() {
    "$megatron_ext_venv/bin/python" -I - "$megatron_ext_repo" <<'PYTHON'
import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

try:
    origin = json.loads(distribution("megatron_ext").read_text("direct_url.json") or "{}")
except PackageNotFoundError:
    origin = {}
sys.exit(origin.get("url") != Path(sys.argv[1]).as_uri())
PYTHON
}

_build_requirements() {
    "$megatron_ext_venv/bin/python" -I - "$megatron_ext_repo/pyproject.toml" <<'PYTHON'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["build-system"]["requires"]))
PYTHON
}

_pip_install() {
    # Where nobody watches, the packages that are there already are only noise.
    if [[ -t 2 ]]; then
        "$megatron_ext_venv/bin/python" -I -m pip install --disable-pip-version-check "$@" >&2
    else
        "$megatron_ext_venv/bin/python" -I -m pip install --disable-pip-version-check \
            --progress-bar off "$@" 2>&1 | sed -u '/^Requirement already satisfied/d' >&2
    fi
}

_prepare_environment() {
    local lock_name=.megatron_ext-lock stamp="$megatron_ext_venv/.megatron_ext-installed"
    local wanted lock requirements
    if [[ -d $megatron_ext_venv && -n "$(ls -A -- "$megatron_ext_venv")" &&
        ! -e $megatron_ext_venv/$lock_name && ! -e $megatron_ext_venv/pyvenv.cfg ]]; then
        _die "$megatron_ext_venv holds other files; point MEGATRON_EXT_VENV at a new directory"
    fi
    mkdir -p -- "$megatron_ext_venv" || _die "cannot make $megatron_ext_venv"

    # Two runs at once must not install into one environment.
    command -v flock >/dev/null || _die "the flock command is needed; install util-linux"
    exec {lock}>"$megatron_ext_venv/$lock_name"
    if ! flock -n "$lock"; then
        _say "waiting for another run that is preparing $megatron_ext_venv"
        flock "$lock"
    fi

    _ensure_python "$lock_name"
    wanted="$(sha256sum <"$megatron_ext_repo/pyproject.toml" | cut -d ' ' -f 1)"
    if [[ "$(cat -- "$stamp" 2>/dev/null)" != "$wanted" ]]; then
        rm -f -- "$stamp"
        _remove_half_installed
        _say "installing megatron_ext and what it needs (the first time: some minutes, some GB)"
        mapfile -t requirements < <(_build_requirements)
        _pip_install "${requirements[@]}" -e "${megatron_ext_repo}[test,docs]" ||
            _die "pip could not install megatron_ext into $megatron_ext_venv (its reason is above)"
        # Last of all, so that an interrupted installation is taken up again.
        printf '%s\n' "$wanted" >"$stamp.part"
        mv -- "$stamp.part" "$stamp"
    elif ! _points_here; then
        _say "pointing $megatron_ext_venv at $megatron_ext_repo"
        _pip_install --quiet --no-deps --no-build-isolation -e "$megatron_ext_repo" ||
            _die "pip could not install megatron_ext into $megatron_ext_venv (its reason is above)"
    fi
    exec {lock}>&-
}

_prepare_environment
export PATH="$megatron_ext_venv/bin:$PATH"
# Another checkout may point a shared environment at itself while this one is still running.
export PYTHONPATH="$megatron_ext_repo${PYTHONPATH:+:$PYTHONPATH}"
