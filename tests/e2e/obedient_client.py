"""A client that draws and adds when it is told to: one JSON line for each line of its input."""

from __future__ import annotations

import json
import sys

import torch

import djinn

DEVICE = "remote_accelerator:0"


def main(addend: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(11)
    kept = torch.full((3,), addend, device=DEVICE)
    dropout = torch.nn.Dropout(0.5)
    for _ in sys.stdin:
        kept += addend
        drawn = torch.rand(3, device=DEVICE)
        dropped = dropout(torch.ones(8, device=DEVICE))
        print(json.dumps([kept.tolist(), drawn.tolist(), dropped.tolist()]), flush=True)
    djinn.synchronize()


main(float(sys.argv[1]))
