#!/usr/bin/env bash
# Runs every CubeCL kernel in bf16 and f32 on CubeCL's own runtime for the CPU, against the reference in f64: the type
# that software Vulkan lacks. Slower than kernels_without_a_gpu.sh, for it builds with LLVM.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/provide_llvm.sh
cargo test --profile proof -p burn-megatron-kernels --features cpu --lib tests::
