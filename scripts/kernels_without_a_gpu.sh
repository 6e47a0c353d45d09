#!/usr/bin/env bash
# Proves the CubeCL kernels where there is no GPU, and installs what that takes:
#   1. on Mesa's software Vulkan every kernel runs, forward and backward, against the reference in f64, with plane
#      operations off and on, in f32 and f16; the ones for NVIDIA's tensor cores run on the CPU in emulation;
#      training runs there as Megatron-LM itself did, and so does what scripts/gpu_check.sh runs on a card, in small;
#   2. every kernel is compiled for NVIDIA cards (sm_80, sm_90a): a table of registers and spills.
# Test results go to the file that $1 names, if it does.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${1:-/dev/null}
target=${CARGO_TARGET_DIR:-target}
say() { printf '\n-- %s (%d s so far)\n' "$*" "$SECONDS"; }
root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

say "software Vulkan, and a C++ compiler"
if ! ls /usr/share/vulkan/icd.d/lvp_icd*.json >/dev/null 2>&1 || ! command -v g++ >/dev/null; then
    root apt-get update -qq
    root apt-get install -y -qq mesa-vulkan-drivers libvulkan1 g++ >/dev/null
fi
# A card that this machine may have stays out of it, so that every machine proves the same.
VK_ICD_FILENAMES=$(ls /usr/share/vulkan/icd.d/lvp_icd*.json | head -n 1)
export VK_ICD_FILENAMES VK_DRIVER_FILES=$VK_ICD_FILENAMES XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/tmp}

# One set of features and packages for all commands: another one would build Burn again.
cargo=(--profile proof --features burn-megatron-kernels/wgpu,burn-megatron-kernels/ptx,megatron-tests/wgpu
    -p burn-megatron-kernels -p megatron-tests)
say "build"
cargo build --quiet "${cargo[@]}" --lib --tests --example ptx --example gpu_check

say "kernels, plane operations off"
BURN_MEGATRON_PLANES=off cargo test --quiet "${cargo[@]}" --lib 2>&1 | tee -a "$results"
say "compilers for NVIDIA cards"
tools=$target/cuda
if [ ! -e "$tools/12.9" ]; then
    command -v python3 >/dev/null || root apt-get install -y -qq python3 >/dev/null
    rm -rf "$tools"
    python3 -m venv "$tools/venv" 2>/dev/null || {
        root apt-get install -y -qq python3-venv >/dev/null
        python3 -m venv --clear "$tools/venv"
    }
    "$tools/venv/bin/pip" install --quiet --no-deps --target "$tools/wheels" \
        nvidia-cuda-nvrtc-cu12==12.9.86 nvidia-cuda-runtime-cu12==12.9.79 \
        nvidia-cuda-nvcc-cu12==12.9.86 nvidia-cuda-cccl-cu12==12.9.27
    touch "$tools/12.9"
fi
cuda=$(realpath "$tools")/wheels/nvidia
say "every kernel for sm_80 and sm_90a"
LD_LIBRARY_PATH=$cuda/cuda_nvrtc/lib "$target/proof/examples/ptx" \
    "$cuda/cuda_nvcc/bin/ptxas" \
    "$cuda/cuda_runtime/include:$cuda/cuda_nvcc/include:$cuda/cuda_cccl/include" "$target/ptx"

say "types and lints of everything with CUDA, and of the kernels on CubeCL's runtime for the CPU"
command -v cargo-clippy >/dev/null || rustup component add clippy
# Without CUDA, and without LLVM, which only a build needs (scripts/build_cuda.sh, scripts/kernels_in_bf16.sh).
DOCS_RS=1 CUDARC_CUDA_VERSION=12090 cargo clippy --quiet --workspace --all-targets \
    --features cuda,burn-megatron-kernels/ptx,burn-megatron-kernels/cpu -- -D warnings
say "kernels, plane operations on"
BURN_MEGATRON_PLANES=on cargo test --quiet "${cargo[@]}" --lib -- --skip emulated 2>&1 | tee -a "$results"
say "training"
cargo test --quiet "${cargo[@]}" --test layouts a_card 2>&1 | tee -a "$results"
say "the check of a card, in small"
"$target/proof/examples/gpu_check" wgpu small

say "done"
