"""A long training run holds no more after many steps than after a few: values and bytes on the server, plans and memory here."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
from long_forms import long_or
from torch import nn
from torch.nn import functional

import djinn
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import recorders
from djinn_client.interception.shape_inference.inference_cache import inference_cache
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers
from tests.shared.executors import only_executor

REMOTE = "remote_accelerator:0"
WARM_UP, SETTLED, TRACED, STEPS = (
    70,
    60,
    long_or(50, 110),
    long_or(120, 200),
)  # what is kept of the latest programs is new after `SETTLED`


class Training:
    """A training loop that reads its loss sometimes, as programs do."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(REMOTE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        # Its learning rate is another one in every step, and so are AdamW's corrections.
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.999)
        self.data = torch.randn(64, 16).to(REMOTE)
        self.labels = torch.randint(4, (64,)).to(REMOTE)

    def run(self, steps):
        total = 0.0
        for step in range(steps):
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(self.data), self.labels)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            if step % 10 == 9:
                total += loss.item()
        del loss
        self.optimizer.zero_grad()
        gc.collect()
        djinn.synchronize()
        djinn.synchronize()  # carries what the first one freed
        return total


def session_usage():
    """Return the number of values and bytes of this process's session on the server."""
    (status,) = ask_servers(client.settings()).values()
    (executor,) = [e for e in status.executors if e.sessions]
    return executor.sessions[-1].values, executor.sessions[-1].memory


def table_sizes():
    """Return the sizes of the tables that this process keeps."""
    executor = only_executor()
    return {
        "calls": len(inference_cache.calls),
        "signatures": len(inference_cache.signatures),
        "freed": len(ops.look_freed()),
        "unsent": sum(len(r.entries) for r in recorders.all()),
        "pending": len(executor.replies.pending),
    }


@pytest.fixture
def training(over_tcp):
    training = Training()
    training.run(WARM_UP)
    return training


def python_memory():
    """Return Python's bytes since tracing began, without the calls of modules, which have a separate limit."""
    gc.collect()
    known = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*/module_calls.py")])
    return sum(trace.size for trace in known.traces)


def test_long_training_memory_is_bounded(training):
    values, memory = session_usage()
    before, stats = table_sizes(), djinn.stats()
    tracemalloc.start()
    try:
        training.run(SETTLED)
        grown = []
        while len(grown) < 6 and (not grown or grown[-1] >= 1024 * TRACED):
            start = python_memory()
            training.run(TRACED)
            grown.append(python_memory() - start)
    finally:
        tracemalloc.stop()
    training.run(STEPS - TRACED - SETTLED)
    assert session_usage() == (values, memory)
    assert table_sizes() == before
    after = djinn.stats()
    for name in ("templates_sent", "plans_made", "bytes_uploaded"):
        assert after[name] == stats[name], name
    assert after["instructions_sent"] > stats["instructions_sent"] + 30 * STEPS, "nothing ran: nothing is shown"
    # How many of the latest programs are kept differs with how they were cut; what is never freed grows each time.
    assert min(grown) < 1024 * TRACED, "one recorded step has more than that"
