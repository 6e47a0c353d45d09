"""PyTorch's own kernels at the shapes of the example gpu_check, in bf16: a JSON line for each."""

import json
import statistics
import time

import torch
import torch.nn.functional as F

LAUNCHES, LOOKS = 10, 7


def measure(name, call):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(LOOKS):
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / LAUNCHES)
    print(json.dumps({"kernel": name, "seconds": statistics.median(times)}), flush=True)


def forward_and_backward(name, f, inputs, d_out):
    """The forward without a graph; the backward alone, of a graph that is kept."""
    with torch.no_grad():
        measure(f"{name} forward", lambda: f(*inputs))
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = f(*leaves)
    measure(f"{name} backward", lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True))


def tensor(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def main():
    s, b, h = 4096, 4, 4096
    x, dy, weight, bias = tensor(s, b, h), tensor(s, b, h), tensor(h), tensor(h)
    compiled = torch.compile
    layer_norm = compiled(lambda x, w, b: F.layer_norm(x, (h,), w, b))
    forward_and_backward("layer_norm", layer_norm, [x, weight, bias], dy)
    added = compiled(lambda x, r, w, b: (x + r, F.layer_norm(x + r, (h,), w, b)))
    forward_and_backward("added layer_norm", added, [x, dy, weight, bias], (dy, x))
    rms_norm = compiled(lambda x, w: F.rms_norm(x, (h,), w))
    forward_and_backward("rms_norm", rms_norm, [x, weight], dy)
    gelu = compiled(lambda x, b: F.gelu(x + b, approximate="tanh"))
    forward_and_backward("bias_gelu", gelu, [x, bias], dy)
    swiglu = compiled(lambda x: F.silu(x[..., : h // 2]) * x[..., h // 2 :])
    forward_and_backward("swiglu", swiglu, [x], tensor(s, b, h // 2))
    with torch.no_grad():
        dropout_add = compiled(lambda x, r: F.dropout(x, 0.1) + r)
        measure("dropout_add", lambda: dropout_add(x, dy))
    for d, heads in [(64, 32), (128, 16)]:
        q, k, v, d_out = (tensor(4, heads, 4096, d) for _ in range(4))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
            with torch.no_grad():
                measure(f"attention forward d {d}", lambda: attention(q, k, v))
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out = attention(*leaves)
            measure(
                f"attention backward d {d}",
                lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True),
            )
    flat = torch.zeros(1 << 28, device="cuda", requires_grad=True)
    flat.grad = torch.zeros_like(flat)
    optimizer = torch.optim.AdamW([flat], fused=True)
    measure("adamw", optimizer.step)
    del flat, optimizer
    lengths = [1 << 21, 2048] * 96
    gradients = [tensor(n) for n in lengths]
    sums = list(torch.zeros(sum(lengths), device="cuda").split(lengths))
    measure("gather", lambda: torch._foreach_add_(sums, gradients))
    weights = list(tensor(sum(lengths)).split(lengths))
    measure("scatter", lambda: torch._foreach_copy_(gradients, weights))
    del gradients, sums, weights
    tokens, vocab, hidden = 8192, 50304, 1024
    states = tensor(tokens, hidden).requires_grad_()
    words = tensor(vocab, hidden).requires_grad_()
    targets = torch.arange(tokens, device="cuda") * 7919 % vocab
    loss = compiled(lambda x, w: F.cross_entropy((x @ w.T).float(), targets))
    measure(
        "output layer and loss",
        lambda: torch.autograd.grad(loss(states, words), [states, words]),
    )


main()
