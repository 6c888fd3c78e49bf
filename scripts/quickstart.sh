#!/usr/bin/env bash
# Train a small GPT with Megatron's 1F1B and with RRFP on this machine's CPU, and compare:
#   scripts/quickstart.sh [--iterations N] [--out DIR]
# The first run makes the environment; the results are in out/quickstart.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
exec python "$megatron_ext_repo/scripts/quickstart.py" "$@"
