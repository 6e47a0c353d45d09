#!/usr/bin/env bash
# Builds with the feature `cuda` on a machine without CUDA: `scripts/build_cuda.sh [arguments of cargo build]`, by default
# the program in release.
#
# CubeCL's build needs LLVM, which it downloads; where it cannot, this takes the same from a Python package.
set -euo pipefail
cd "$(dirname "$0")/.."

llvm=${XDG_DATA_HOME:-$HOME/.local/share}/tracel
if [ ! -e "$llvm/tracel-llvm-23.1.0-4/.tracel-llvm-installed" ]; then
    mkdir -p "$llvm"
    python3 -m pip install --quiet --no-deps --target "$llvm/sdk" \
        mlc-llvm-static==23.1.1.post0 mlc-llvm-static-extra-targets==23.1.1.post0
    ln -sfn "$llvm/sdk/mlc_llvm_static/static" "$llvm/tracel-llvm-23.1.0-4"
    "$llvm/tracel-llvm-23.1.0-4/bin/llvm-config" --link-static --version
    touch "$llvm/tracel-llvm-23.1.0-4/.tracel-llvm-installed"
fi
if [ $# = 0 ]; then
    set -- --release -p megatron
fi
# The bindings' version, which they would ask nvcc for.
CUDARC_CUDA_VERSION=12090 exec cargo build --features cuda "$@"
