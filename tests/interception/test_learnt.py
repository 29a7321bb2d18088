"""Caches of learnt calls keep their size, and their entries are verified again for another device."""

from __future__ import annotations

import threading

import pytest
import torch

import djinn
from djinn_client.interception.dispatch import learn_layout
from djinn_client.interception.recording import arguments as call_forms
from djinn_client.interception.shape_inference import meta_infer
from djinn_client.interception.shape_inference.inference_cache import inference_cache, keep
from djinn_core.ir import values
from djinn_core.ir.form import Form
from djinn_core.ir.values import tensor_meta


def test_learned_tables_are_bounded():
    known = {}
    for number in range(100):
        assert keep(known, number, -number, 10) == -number
    assert len(known) <= 10
    assert keep(known, 99, "another", 10) == -99


def test_signatures_and_forms_are_bounded(monkeypatch):
    monkeypatch.setattr(inference_cache, "signatures", {})
    monkeypatch.setattr(call_forms, "_forms", {})
    monkeypatch.setattr(meta_infer, "SIGNATURES_LIMIT", 8)
    meta = tensor_meta((2,), (1,), 0, torch.float32)
    made = [meta_infer.signature_of(Form(f"aten::op{n}", (), (), (), False), (meta,)) for n in range(50)]
    assert len(inference_cache.signatures) <= 8
    again = meta_infer.signature_of(made[0].form, (meta,))
    # Forgotten, so it is another one, and nothing that was planned by the id of the first is taken for it.
    assert again is not made[0]
    assert len({s.id for s in [*made, again]}) == 51


def test_metadata_is_interned_once_across_threads():
    barrier, found = threading.Barrier(8), [[] for _ in range(8)]

    def intern_metadata(mine):
        barrier.wait()
        mine.extend(tensor_meta((7, n), (n, 1), 0, torch.float32) for n in range(300))

    threads = [threading.Thread(target=intern_metadata, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({id(mine[n]) for mine in found}) == 1 for n in range(300))
    assert isinstance(values._intern_lock, type(threading.RLock()))


def record_call(program):
    """Return the only call that `program` records."""
    with djinn.capture() as captured:
        program()
    (call,) = captured.program.calls
    return call


@pytest.fixture
def another_session(embedded):
    """Return a function that replaces the session, as with a server of another kind."""

    def begin():
        djinn.shut_down()
        djinn.configure(threads=1)
        djinn.init()

    return begin


def test_learned_layout_is_not_used_on_other_device(embedded, another_session):
    # The kernel of another kind of device is only told of: `learn_layout` is what the reply of one would have called.
    x = torch.ones(3, 5, device=embedded)
    call = record_call(lambda: x.add(1.5))
    learn_layout(call, 0, (1, 3))
    assert record_call(lambda: x.add(1.5)).results[0].stride == (1, 3)
    another_session()
    x = torch.ones(3, 5, device=embedded)
    assert record_call(lambda: x.add(1.5)).results[0].stride == (5, 1)
    assert x.add(1.5).stride() == (5, 1)


def test_confirmed_layout_is_verified_on_other_device(embedded, another_session):
    x = torch.ones(3, 5, device=embedded)
    call = record_call(lambda: x.mul(2.5))
    x.mul(2.5).cpu()
    assert call.signature.layout_trusted
    another_session()
    assert not call.signature.layout_trusted, "a call that a capture keeps would go unverified"
    x = torch.ones(3, 5, device=embedded)
    x.mul(2.5).cpu()
    assert record_call(lambda: x.mul(2.5)).signature.layout_trusted


def test_statistics_dtype_is_asked_once(embedded):
    weight = torch.ones(4, device=embedded, dtype=torch.bfloat16)
    normalised = [
        torch.native_layer_norm(torch.ones(n, 4, device=embedded, dtype=torch.bfloat16), [4], weight, weight, 1e-5)
        for n in (2, 3)
    ]
    trips = djinn.stats()["round_trips"]
    out, mean, _ = torch.native_layer_norm(
        torch.ones(5, 4, device=embedded, dtype=torch.bfloat16), [4], weight, weight, 1e-5
    )
    assert djinn.stats()["round_trips"] == trips
    assert mean.dtype == torch.bfloat16 == normalised[0][1].dtype  # as the CPU has it
    assert mean.cpu().dtype == torch.bfloat16
    assert out.cpu().shape == (5, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weight_norm_of_narrow_layer_equals_kernel(embedded, dtype):
    def result(device):
        torch.manual_seed(0)
        layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(4, 6, 3), dim=2).to(dtype).to(device)
        out = layer(torch.ones(2, 4, 9, dtype=dtype, device=device))
        out.sum().backward()
        return [out.cpu(), *[p.grad.cpu() for p in layer.parameters()]]

    for here, there in zip(result("cpu"), result(embedded), strict=True):
        assert torch.equal(here, there)


def test_known_call_resizes_out_tensor(embedded):
    """The executor returns the metadata of `native_batch_norm.out` once per combination of operand metadata."""
    given = [torch.rand(2, 3, 4), *(torch.rand(3) for _ in range(4))]
    there = [t.to(embedded) for t in given]
    for size in (0, 0, 7, 7):
        expected, actual = ([torch.empty(size, device=d) for _ in range(3)] for d in ("cpu", embedded))
        for arguments, (out, mean, scale) in ((given, expected), (there, actual)):
            torch.ops.aten.native_batch_norm.out(
                *arguments, True, 0.5, 1e-5, out=out, save_mean=mean, save_invstd=scale
            )
        assert [t.shape for t in actual] == [t.shape for t in expected]
        assert all(torch.equal(a.cpu(), e) for a, e in zip(actual, expected, strict=True))
