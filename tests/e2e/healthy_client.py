"""A client that generates all the time: prints `same` or `different` for each sequence, until its input ends."""

from __future__ import annotations

import copy
import sys
import threading
import time

import torch
from torch import nn

import djinn  # noqa: F401 - registers the device


class Writer(nn.Module):
    """A recurrent model that generates greedily, one token at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.GRU(32, 32, 2)
        self.head = nn.Linear(32, 50)

    @torch.no_grad()
    def write(self, start: int, device: str) -> list[int]:
        token, state, written = torch.tensor([start], device=device), None, []
        for _ in range(12):
            out, state = self.layers(self.embedding(token), state)
            token = self.head(out).argmax(dim=-1)
            written.append(token.item())
        return written


def main() -> None:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    local = Writer()
    remote = copy.deepcopy(local).to("remote_accelerator:0")
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    start = 0
    while not over.is_set():
        start = (start + 1) % 50
        same = local.write(start, "cpu") == remote.write(start, "remote_accelerator:0")
        print("same" if same else "different", flush=True)
        time.sleep(0.02)  # it shows that it is served, and leaves the machine to the tests
    print("done", flush=True)


main()
