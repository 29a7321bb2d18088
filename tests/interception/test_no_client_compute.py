"""Nothing is computed on the client: PyTorch's own trace of all kernels that ran here, while models train and generate.

`ExecutionTraceObserver` is told of every op that PyTorch's dispatcher runs in this process, however it was reached, with
the device and size of each of its tensors. What may run here is what moves data, what single numbers need (the step
counters of optimizers, `item()`), the meta kernels, and what is folded of small integers when a program asks for a number of them.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch.profiler import ExecutionTraceObserver
from transformers import GPT2Config, GPT2LMHeadModel

# Ops that move or describe CPU tensors, on the way to the device and back.
TRANSPORT = frozenset({
    "PythonSubclass",  # how the trace calls the recording of an op
    *(
        f"aten::{name}"
        for name in (
            "_local_scalar_dense _reshape_alias _to_copy alias as_strided clone contiguous copy_ detach detach_ empty "
            "empty_like empty_strided is_pinned item lift_fresh resolve_conj resolve_neg set_ slice to view"
        ).split()
    ),
})  # fmt: skip


@pytest.fixture
def local_kernels(tmp_path):
    """Return a function that returns the kernels that compute on CPU tensors of over one element during a call."""

    def run(function):
        file = tmp_path / "trace.json"
        observer = ExecutionTraceObserver().register_callback(str(file))
        observer.start()
        try:
            function()
        finally:
            observer.stop()
            observer.unregister_callback()
        nodes = json.loads(file.read_text())["nodes"]
        assert nodes
        return {node["name"] for node in nodes if "::" in node["name"] and is_local_compute(node)} - TRANSPORT

    return run


def is_local_compute(node):
    """Return True if an op computes on floating-point CPU tensors and on no remote tensor."""
    tensors = tensors_of(node)
    types = repr([node[part]["types"] for part in ("inputs", "outputs")])
    of_floats = "Tensor(float)" in types or "Tensor(double)" in types or "Tensor(c10::" in types
    return of_floats and ("cpu", True) in tensors and not any(device.startswith("remote") for device, _ in tensors)


def tensors_of(node):
    """Return the set of (device, has over one element) of an op's tensors."""
    return set(_tensors([node["inputs"]["values"], node["outputs"]["values"]]))


def _tensors(values):
    for value in values if isinstance(values, list) else ():
        # Number of the tensor and of its storage, offset, elements, bytes of an element, device.
        if isinstance(value, list) and [type(v) for v in value] == [int] * 5 + [str]:
            yield value[5].partition(":")[0], value[3] > 1
        else:
            yield from _tensors(value)


def gpt2(device):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).to(device)


def train(model, optimizer, loss_of, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert loss.item() > 0


@pytest.mark.parametrize("foreach", [True, False])
def test_training_gpt2_runs_no_client_kernels(embedded, local_kernels, foreach):
    model = gpt2(embedded).train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    batches = [torch.randint(2, 50, (2, 8)) for _ in range(2)]
    assert (
        local_kernels(
            lambda: train(
                model, optimizer, lambda m, ids: m(ids, labels=ids).loss, [(b.to(embedded),) for b in batches]
            )
        )
        == set()
    )


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 5}, {"num_beams": 2}], ids=str)
def test_generation_runs_no_client_kernels(embedded, local_kernels, options):
    model, ids = gpt2(embedded).eval(), torch.randint(2, 50, (2, 6))

    def program():
        given = ids.to(embedded)
        made = model.generate(
            given, attention_mask=torch.ones_like(given), pad_token_id=1, max_new_tokens=4, min_new_tokens=4, **options
        )
        assert made.cpu().shape == (2, 10)

    own = {
        "aten::cat",
        "aten::ones",
        "aten::zeros",
        "aten::fill_",
        "aten::zero_",
    }  # beam search makes a mask on the CPU
    assert local_kernels(program) <= (own if "num_beams" in options else set())


def test_training_cnn_runs_no_client_kernels(embedded, local_kernels):
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Dropout(0.1), torch.nn.Linear(36, 5)).to(embedded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])) for _ in range(2)]

    def program():
        remote = [(x.to(embedded), y.to(embedded)) for x, y in batches]
        train(model, optimizer, lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y), remote)
        model.eval()
        assert model(remote[0][0]).argmax(1).cpu().shape == (4,)

    assert local_kernels(program) == set()


def test_training_lstm_runs_no_client_kernels(embedded, local_kernels):
    torch.manual_seed(0)
    model = torch.nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True).to(embedded)
    optimizer = torch.optim.Adam(model.parameters())
    batches = [(torch.randn(2, 5, 8),) for _ in range(2)]

    def program():
        train(model, optimizer, lambda m, x: m(x)[0].square().sum(), [(x.to(embedded),) for (x,) in batches])

    assert local_kernels(program) == set()


def test_data_dependent_views_run_no_client_kernels(embedded, local_kernels):
    given = torch.randn(4, 6)

    def program():
        x = given.to(embedded) * 1  # small uploads are known here, what is calculated with them is not
        chosen = x[x > 0]
        x[:, ::2] += 1
        found = torch.nonzero(x)
        assert found.shape[1] == 2
        x.t()[0, torch.tensor([1, 2])].clone()
        torch.unique(x.round())
        assert chosen.sum().item() > 0

    assert local_kernels(program) == set()


def test_trace_detects_client_kernels(embedded, local_kernels):
    """Check the check: a program that fetches and computes locally is detected."""
    x = torch.randn(4, 6, device=embedded)
    assert {"aten::exp"} == local_kernels(lambda: (x + 1).cpu().exp())
