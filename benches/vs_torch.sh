#!/usr/bin/env bash
# A training step beside PyTorch's on the CPU, f32, the same model and the same number of threads: both run in turn,
# ROUNDS times (default 3), and the medians of their steps are compared.
#
# Sets PyTorch up in VENV (default target/torch-venv; several gigabytes). "tuned" is PyTorch with the allocator setting
# that this project's program uses.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-target/torch-venv}
rounds=${ROUNDS:-3}

if ! [ -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
fi
"$venv/bin/python" -c 'import torch' 2>/dev/null || "$venv/bin/pip" install --quiet torch numpy
cargo build --release --workspace --examples
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

for case in A B; do
    steps=$([ $case = A ] && echo 4 || echo 20)
    for round in $(seq "$rounds"); do
        echo "case $case, round $round of $rounds" >&2
        target/release/examples/step_time $case "$steps" >>"$out/$case-ours"
        "$venv/bin/python" benches/vs_torch.py $case "$steps" eager >>"$out/$case-eager"
        MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4294967295 \
            "$venv/bin/python" benches/vs_torch.py $case "$steps" eager >>"$out/$case-tuned"
        if [ "${COMPILE:-1}" = 1 ]; then
            "$venv/bin/python" benches/vs_torch.py $case "$steps" compile >>"$out/$case-compile" || true
        fi
    done
done

"$venv/bin/python" - "$out" <<'PYTHON'
import json, os, statistics, sys

def read(path):
    runs = [json.loads(line) for line in open(path)]
    seconds = [s for run in runs for s in run["seconds"]]
    return statistics.median(seconds), min(seconds), max(seconds), max(run["peak_mb"] for run in runs)

for case in "AB":
    ours = read(f"{sys.argv[1]}/{case}-ours")
    print(f"{case}: ours {ours[0]:.3f} s [{ours[1]:.3f}, {ours[2]:.3f}], {ours[3]} MB")
    for name in ["eager", "tuned", "compile"]:
        path = f"{sys.argv[1]}/{case}-{name}"
        if os.path.exists(path) and os.path.getsize(path):
            torch = read(path)
            print(
                f"   torch {name} {torch[0]:.3f} s [{torch[1]:.3f}, {torch[2]:.3f}], {torch[3]} MB:"
                f" time {ours[0] / torch[0]:.2f}, memory {ours[3] / torch[3]:.2f}"
            )
PYTHON
