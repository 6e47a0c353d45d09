#!/usr/bin/env bash
# Checks and measures the kernels and a training step on an NVIDIA card, in under eight minutes, from binaries that were
# built elsewhere: no cargo, no network.
#
#   scripts/gpu_check.sh build      where cargo and LLVM are (scripts/build_cuda.sh): binaries into target/gpu_check
#   scripts/gpu_check.sh [results]  on the card: a page into benches/results (or the folder named)
#
# Beside them it runs PyTorch's own kernels and training step if a python with torch is there (PYTHON, default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
binaries=target/gpu_check

if [ "${1:-}" = build ]; then
    scripts/build_cuda.sh --release -p burn-megatron-kernels --example gpu_check
    scripts/build_cuda.sh --release -p megatron-benches --example step_time
    mkdir -p "$binaries"
    cp target/release/examples/gpu_check target/release/examples/step_time "$binaries"
    git rev-parse --short HEAD >"$binaries/commit"
    exit
fi

python=${PYTHON:-python3}
results=${1:-benches/results}
card=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
commit=$(cat "$binaries/commit")
mkdir -p "$results"
page=$results/$(date +%F)-${card// /-}-$commit.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
torch=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null || true)

# Kernels are compiled with NVRTC and CUDA's headers: those of an installation, or of the Python packages that PyTorch
# brings.
if [ -z "${CUDA_PATH:-}" ] && [ ! -e /usr/local/cuda/include/cuda_bf16.h ]; then
    packages=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null || true)
    if [ -z "$packages" ]; then
        echo "no CUDA headers: set CUDA_PATH, or PYTHON to a python with torch" >&2
        exit 1
    fi
    export CUDA_PATH=$work/cuda
    mkdir -p "$CUDA_PATH/include"
    for folder in "$packages"/*/include; do
        cp -rsn "$folder/." "$CUDA_PATH/include/"
    done
    library=$(find "$packages" -name 'libnvrtc.so*' | head -n 1)
    export LD_LIBRARY_PATH=$(dirname "$library")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

failed=0
echo "kernels on $card" >&2
"$binaries/gpu_check" cuda >"$work/kernels" 2>"$work/kernels.json" || failed=$?
if [ -n "$torch" ]; then
    echo "PyTorch $torch" >&2
    timeout 150 "$python" scripts/gpu_check.py >"$work/torch.json" || true
fi
# What a command says within so many seconds, or that there is no figure.
figure() {
    local seconds=$1
    shift
    timeout "$seconds" "$@" || {
        echo "no figure: $* ended with $? (124: it ran past $seconds s)" >&2
        echo '{}'
    }
}
: >"$work/steps"
for case in 124M 1.3B; do
    echo "training step $case" >&2
    ours=$(figure 60 "$binaries/step_time" $case 5 cuda)
    theirs='{}'
    if [ -n "$torch" ]; then
        theirs=$(figure 90 "$python" benches/vs_torch.py $case 5 compile cuda)
    fi
    printf '%s\t%s\t%s\n' $case "$ours" "$theirs" >>"$work/steps"
done

"$python" - "$work" >"$page" <<PYTHON
import json, os, re, statistics, sys

work = sys.argv[1]
print("# $card, $(date +%F), commit $commit, PyTorch ${torch:-not there}\n")
print("\`\`\`\n" + open(f"{work}/kernels").read() + "\`\`\`\n")

def lines(name):
    path = f"{work}/{name}"
    text = open(path).read().splitlines() if os.path.exists(path) else []
    return [json.loads(line) for line in text if line.startswith("{")]

# The first of a name is bf16's.
ours = {}
for line in lines("kernels.json"):
    ours.setdefault(line["kernel"], line)
print("| kernel, bf16 | ours, us | of the bound | PyTorch, us | ours / PyTorch |\n|---|---|---|---|---|")
torch = {line["kernel"]: line["seconds"] for line in lines("torch.json")}
for name, line in ours.items():
    there = torch.get(name)
    other = f"{there * 1e6:.1f} | {line['seconds'] / there:.2f}" if there else "- | -"
    print(f"| {name} | {line['seconds'] * 1e6:.1f} | {line['part']:.0%} of {line['bound']} | {other} |")

# Parameters, tokens of a step, layers x sequence x hidden: a token takes 6 N + 6 L s h operations, causal.
sizes = {"124M": (124e6, 16 * 1024, 12 * 1024 * 768), "1.3B": (1.3e9, 4 * 2048, 24 * 2048 * 2048)}
# What a large product makes on this card: the first that is said is bf16's.
product = re.search(r"makes ([0-9.]+) TFLOP/s", open(f"{work}/kernels").read())
product = float(product[1]) * 1e12 if product else None
print("\n| step, bf16 | ours, tokens/s | TFLOP/s | of a product's | PyTorch compile, tokens/s | ours / PyTorch |")
print("|---|---|---|---|---|---|")
for line in open(f"{work}/steps"):
    case, ours, theirs = line.rstrip("\n").split("\t")
    rates = []
    parameters, tokens, attention = sizes[case]
    for text in (ours, theirs):
        seconds = json.loads(text or "{}").get("seconds")
        rates.append(tokens / statistics.median(seconds) if seconds else None)
    show = lambda rate: f"{rate:,.0f}" if rate else "-"
    done = rates[0] * (6 * parameters + 6 * attention) if rates[0] else None
    work_rate = f"{done / 1e12:.0f}" if done else "-"
    part = f"{done / product:.0%}" if done and product else "-"
    ratio = f"{rates[0] / rates[1]:.2f}" if all(rates) else "-"
    print(f"| {case} | {show(rates[0])} | {work_rate} | {part} | {show(rates[1])} | {ratio} |")
PYTHON
cat "$page"
echo "written to $page" >&2
exit "$failed"
