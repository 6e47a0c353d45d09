#!/usr/bin/env bash
# The LLVM that CubeCL's features `cuda` and `cpu` build with, from a Python package, where its own download cannot be
# reached. Does nothing if it is there.
set -euo pipefail

llvm=${XDG_DATA_HOME:-$HOME/.local/share}/tracel
here=$llvm/tracel-llvm-23.1.0-4
if [ ! -e "$here/.tracel-llvm-installed" ]; then
    mkdir -p "$llvm"
    python3 -m pip install --quiet --no-deps --target "$llvm/sdk" \
        mlc-llvm-static==23.1.1.post0 mlc-llvm-static-extra-targets==23.1.1.post0
    ln -sfn "$llvm/sdk/mlc_llvm_static/static" "$here"
    "$here/bin/llvm-config" --link-static --version
    touch "$here/.tracel-llvm-installed"
fi
