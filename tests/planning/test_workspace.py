"""Work space of ops, as cost models say it, against what PyTorch's allocator gives out inside of the kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import djinn
from djinn.planning import work_of

SMALL = 64 << 10  # buffers of kernels that no rule is made for
aten = torch.ops.aten


def cases():
    """Return calls by name, with prepared operands."""
    data, square, heads = torch.randn(2, 16, 28, 28), torch.randn(32, 16, 3, 3), torch.randn(2, 4, 256, 32)
    grad, single = torch.randn(2, 32, 28, 28), torch.randn(50_000)
    moved, one, many = heads.transpose(1, 2), heads[:, :1], torch.randn(2, 4, 32, 256)
    mask = torch.ones(2, 4, 256, 256, dtype=torch.bool)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)
    lstm, steps, state = torch.nn.LSTM(32, 64), torch.randn(40, 8, 32), torch.zeros(1, 8, 64)
    weights = [p.detach() for p in lstm.parameters()]
    pairs, ones = [1, 1], [True] * 3
    return {
        "convolution": lambda m: aten.convolution(m(data), m(square), None, pairs, pairs, pairs, False, [0, 0], 1),
        "transposed": lambda m: aten.convolution(m(data), m(square[:16]), None, [2, 2], pairs, pairs, True, [0, 0], 1),
        "convolution backward": lambda m: aten.convolution_backward(
            m(grad), m(data), m(square), None, pairs, pairs, pairs, False, [0, 0], 1, [True, True, False]
        ),
        "batch norm backward": lambda m: aten.native_batch_norm_backward(
            m(data), m(data), None, None, None, m(torch.zeros(16)), m(torch.ones(16)), True, 1e-5, ones
        ),
        "layer norm of a transpose": lambda m: aten.native_layer_norm(m(moved), [32], None, None, 1e-5),
        "attention": lambda m: aten.scaled_dot_product_attention(m(heads), m(heads), m(heads)),
        "attention with a mask": lambda m: aten.scaled_dot_product_attention(m(heads), m(heads), m(heads), m(mask)),
        "attention backward": lambda m: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            m(heads), m(heads), m(heads), m(heads), m(out), m(sums), 0.0, False
        ),
        "sort": lambda m: aten.kthvalue(m(single), 7),
        "unique": lambda m: aten._unique2(m(single.floor())),
        "mask": lambda m: aten.index(m(single), [m(single) > -1]),
        "broadcast product": lambda m: aten.matmul(m(one), m(many)),
        "product of moved heads": lambda m: aten.matmul(m(moved), m(moved.transpose(2, 3))),
        "one batch": lambda m: aten.bmm(m(heads[0]), m(many[0])),
        "recurrent": lambda m: aten.lstm.input(
            m(steps), [m(state), m(state)], list(map(m, weights)), True, 1, 0.0, False, False, False
        ),
        "logsumexp": lambda m: aten.logsumexp(m(heads), [-1]),
        "elementwise": lambda m: aten.gelu(m(data)),
    }


def measure_workspaces(calls):
    """Return by case the peak bytes that the kernel allocates besides its results."""
    threads, kept = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for call in calls.values():
            call(lambda tensor: tensor)  # what a first call keeps
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for name, call in calls.items():
                with record_function(f"case {name}"):
                    kept.append(call(lambda tensor: tensor))
    finally:
        torch.set_num_threads(threads)
    events = profiled.profiler.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    found = {}
    for event in events:
        if event.name().startswith("case "):
            sizes = [size for moment, size in memory if event.start_ns() <= moment <= event.end_ns()]
            found[event.name()[5:]] = max(itertools.accumulate(sizes), default=0) - sum(sizes)  # the sum: what is left
    return found


@pytest.mark.usefixtures("embedded")
def test_workspace_equals_kernel_allocations():
    said, kept = {}, []
    with torch.no_grad():
        calls = cases()
        for name, call in calls.items():
            with djinn.capture() as captured:
                kept.append(call(lambda tensor: tensor.to("remote_accelerator")))
            said[name] = max(work_of(captured.graph, node).workspace for node in captured.graph.nodes)
        found = measure_workspaces(calls)
    wrong = {
        name: (said[name], found[name])
        for name in calls
        if not found[name] * 0.85 - SMALL <= said[name] <= found[name] * 1.5 + SMALL
    }
    assert not wrong
    assert min(said["convolution"], said["sort"], said["attention with a mask"]) > SMALL
