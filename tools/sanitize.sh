#!/usr/bin/env bash
# Memory errors and races of the kernels: their tests under compute-sanitizer, on a GPU. Slow: give pytest's -k a subset.
#   tools/sanitize.sh [memcheck|racecheck|initcheck|synccheck] [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
tool="${1:-memcheck}"
shift || true
# The caching allocator hides overruns between tensors of one block.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
exec compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 99 \
  python3 -m pytest -q -p no:cacheprovider -p no:xdist tests/runtime/kernels "$@"
