"""A script of a reader's: two steps of training on whichever device there is."""

import torch

device = "cuda" if torch.cuda.is_available() else "remote_accelerator:0"
if device != "cuda":
    import djinn  # noqa: F401 - registers the device

layer = torch.nn.Linear(4, 4).to(device)
for _ in range(2):
    layer(torch.ones(2, 4, device=device)).sum().backward()
    print(layer.weight.grad.sum().item())
