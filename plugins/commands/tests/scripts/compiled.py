"""`torch.compile` with the backend `djinn`, for inference and for training; without a GPU, as it is written."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
options = parser.parse_args()

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
model = plain.to(options.device)
run = torch.compile(model, backend="djinn") if options.device == "cuda" else model
x = torch.randn(5, 8).to(options.device)
with torch.no_grad():
    print(f"inference {run(x).sum().item():.4f}")
    print(f"again {run(x * 2).sum().item():.4f}")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    loss = run(x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
