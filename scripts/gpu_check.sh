#!/usr/bin/env bash
# What megatron_ext does on this machine's GPU, in less than 8 minutes:
#   scripts/gpu_check.sh [--json FILE] [--dry-run-cpu] [--only CHECK...] [--limit-s S] [--out DIR]
# A Python that has megatron_ext, Megatron and PyTorch is used as it is (no network is needed
# then); else the first run makes the environment, as scripts/quickstart.sh does.
set -euo pipefail
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
if [[ -z ${MEGATRON_EXT_VENV:-} ]] && command -v python >/dev/null &&
    (cd / && PYTHONPATH="${here%/*}${PYTHONPATH:+:$PYTHONPATH}" python -c '
import importlib.util, sys
needed = ("megatron_ext", "megatron", "torch", "rich")
sys.exit(sys.version_info < (3, 12) or not all(map(importlib.util.find_spec, needed)))
' 2>/dev/null); then
    megatron_ext_repo="${here%/*}"
    export PYTHONPATH="$megatron_ext_repo${PYTHONPATH:+:$PYTHONPATH}"
else
    # shellcheck source=scripts/environment.sh
    source "$here/environment.sh"
fi
exec python "$megatron_ext_repo/scripts/gpu_check.py" "$@"
