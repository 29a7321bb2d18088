"""Train a GPT as nanoGPT does: mixed precision, accumulation, workers, a schedule, a checkpoint and resuming."""

import argparse
import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--checkpoint", default="")
parser.add_argument("--resume", default="")
parser.add_argument("--workers", type=int, default=2)
options = parser.parse_args()

BLOCK, VOCABULARY, WIDTH, ACCUMULATE = 16, 40, 32, 2


class Text(Dataset):
    def __init__(self):
        self.data = torch.arange(4000) * 7 % VOCABULARY

    def __len__(self):
        return 64

    def __getitem__(self, index):
        start = index * 11
        return self.data[start : start + BLOCK], self.data[start + 1 : start + BLOCK + 1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, 4, c // 4).transpose(1, 2) for p in self.qkv(self.ln1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, x, y):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.ln(h))
        return F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1))


def main():
    torch.manual_seed(1337)
    device = options.device
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    on_cuda = device == "cuda"
    scaler = torch.amp.GradScaler("cuda", enabled=on_cuda)
    context = torch.amp.autocast("cuda", dtype=torch.float16) if on_cuda else nullcontext()
    first = 0
    if options.resume:
        saved = torch.load(options.resume, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    loader = DataLoader(Text(), batch_size=8, num_workers=options.workers, pin_memory=on_cuda)
    batches = iter(loader)
    for step in range(first, first + options.steps // ACCUMULATE):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 20))
        total = 0.0
        for _ in range(ACCUMULATE):
            x, y = (part.to(device, non_blocking=True) for part in next(batches))
            with context:
                loss = model(x, y) / ACCUMULATE
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {total:.3f}")
    if options.checkpoint:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, options.checkpoint
        )


if __name__ == "__main__":  # workers may be started with forkserver, as by default from Python 3.14 on
    main()
