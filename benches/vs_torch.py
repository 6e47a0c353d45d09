"""Training steps of a GPT in PyTorch: `vs_torch.py A|B|124M|1.3B STEPS eager|compile [cpu|cuda]`.

The model, optimizer and clipping of benches/step, in f32 on the CPU, and on a card with activations in bf16; prints the
same JSON line as the example step_time.
"""

import json
import resource
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

CASES = {
    "A": dict(layers=6, hidden=384, heads=6, seq=256, batch=8, vocab=50304),
    "B": dict(layers=4, hidden=256, heads=4, seq=128, batch=8, vocab=8192),
    "124M": dict(layers=12, hidden=768, heads=12, seq=1024, batch=16, vocab=50304),
    "1.3B": dict(layers=24, hidden=2048, heads=16, seq=2048, batch=4, vocab=50304),
}


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        b, s, h = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, hidden, heads, seq, vocab):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, labels):
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def main():
    case, steps, mode = CASES[sys.argv[1]], int(sys.argv[2]), sys.argv[3]
    device = sys.argv[4] if len(sys.argv) > 4 else "cpu"
    torch.manual_seed(1)
    batch, seq, vocab = case.pop("batch"), case["seq"], case["vocab"]
    model = Gpt(**case).to(device)
    run = torch.compile(model) if mode == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    tokens = (torch.arange(batch * (seq + 1)) * 7919 % vocab).view(batch, seq + 1).to(device)

    def step():
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - start

    for _ in range(3 if mode == "compile" else 1):
        step()
    seconds = [step() for _ in range(steps)]
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() // 1_000_000
        return print(json.dumps({"seconds": seconds, "peak_mb": peak}))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 1_000_000
    print(json.dumps({"seconds": seconds, "peak_mb": peak}))


main()
