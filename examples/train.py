"""Training on remote_accelerator. The loop waits for the server when it reads the loss, ten times."""

import torch
from torch import nn

import djinn

device = torch.device("remote_accelerator:0")
torch.manual_seed(0)

points = torch.rand(2000, 2, device=device) * 2 - 1
inside = (points.square().sum(dim=1) < 0.6).long()  # which points lie in a circle

model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

for step in range(200):
    loss = nn.functional.cross_entropy(model(points), inside)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1:3}: loss {loss.item():.4f}")

right = (model(points).argmax(dim=1) == inside).float().mean().item()
counted = djinn.stats()
print(f"{right:.1%} right, after {counted['ops_captured']:,} ops in {counted['round_trips']} round trips")
