#!/usr/bin/env bash
# Runs every CubeCL kernel in bf16 and f32 on CubeCL's own runtime for the CPU, against the reference in f64: the type
# that software Vulkan lacks. Slower than kernels_without_a_gpu.sh, for it builds with LLVM.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/provide_llvm.sh
tests=(cargo test --profile proof -p burn-megatron-kernels --features cpu --lib)
"${tests[@]}" --no-run

# What LLVM calls to round f32 to bf16 on a processor without an instruction for it; only newer compilers' libraries have
# it. Its result is the lower half of a vector register, as that of a `_Float16`.
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
gcc -shared -fPIC -O2 -msse2 -x c -o "$folder/bf16.so" - <<'C'
#include <stdint.h>
#include <string.h>
_Float16 __truncsfbf2(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    uint16_t half = rounded >> 16;
    _Float16 result;
    memcpy(&result, &half, 2);
    return result;
}
C
LD_PRELOAD=$folder/bf16.so "${tests[@]}" tests::
