#!/usr/bin/env bash
# Run the tests, all of them or those that the pytest arguments choose:
#   scripts/test.sh
#   scripts/test.sh tests/test_corpus.py -k links
# Paths are relative to the repository.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$megatron_ext_repo"
exec python -m pytest "$@"
