#!/usr/bin/env bash
# Builds with the feature `cuda` on a machine without CUDA: `scripts/build_cuda.sh [arguments of cargo build]`, by default
# the program in release. CubeCL's build needs LLVM, which `provide_llvm.sh` brings.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/provide_llvm.sh
if [ $# = 0 ]; then
    set -- --release -p megatron
fi
# The bindings' version, which they would ask nvcc for.
CUDARC_CUDA_VERSION=12090 exec cargo build --features cuda "$@"
