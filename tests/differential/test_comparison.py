"""Mutation tests of the harness: for each compared property, a device that is wrong in it."""

from __future__ import annotations

import warnings

import pytest
import torch

from djinn_client.interception.shape_inference import meta_overrides
from evaluation.differential.differences import differences, first_difference
from evaluation.differential.program_grammar import generated
from evaluation.differential.program_runs import LOOKS, REMOTE, run
from evaluation.differential.shrinking import shrunk

PROGRAM = ("a = torch.arange(12.0, device=D).view(3, 4)", "b = faulty(a.clone())", "c = b")


def _raise(text):
    raise RuntimeError(text)


def _with_gradient(tensor):
    tensor.requires_grad_().sum().backward()
    return tensor


# property -> what the remote device returns for a tensor, and what the CPU does
FAULTS = {
    "shape": lambda t: t[:1].clone(),
    "dtype": lambda t: t.double(),
    "device": lambda t: t.to("meta"),
    "layout": lambda t: t.to_sparse(),
    "stride": lambda t: t.mT.contiguous().mT,
    "storage_offset": lambda t: torch.stack([t, t])[1],
    "version": lambda t: t.add_(0),
    "requires_grad": lambda t: t.requires_grad_(),
    "is_leaf": lambda t: t.requires_grad_() * 1,
    "grad_fn": lambda t: t.requires_grad_() * 1,
    "grad": _with_gradient,
    "is_parameter": torch.nn.Parameter,
    "is_view": lambda t: t.view_as(t),
    "base": lambda t: t.view_as(t),
    "conj, neg": torch._neg_view,
    "value": lambda t: t.nextafter(t + 1),
    "printed": lambda t: print("text") or t,
    "warnings": lambda t: warnings.warn("text", stacklevel=1) or t,
    "error": lambda t: _raise("text"),
}


def noticed_properties(faulty, right=lambda t: t, program=PROGRAM):
    extra = {"faulty": lambda device: right if device == "cpu" else faulty}
    here = run(program, "cpu", extra)
    return {d.property for d in differences(program, here, run(program, REMOTE, extra))}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_detected(embedded, name):
    assert name in noticed_properties(FAULTS[name])


def test_every_compared_property_has_fault():
    assert LOOKS.keys() - FAULTS.keys() == {"idle stride"}  # known to differ


def test_correct_device_has_no_differences(embedded):
    assert noticed_properties(lambda t: t) == set()


def test_one_sided_memory_sharing_is_detected(embedded):
    program = ("a = torch.ones(3, device=D)", "b = faulty(a)")
    assert "shares" in noticed_properties(lambda t: t.clone(), lambda t: t, program)


def test_error_texts_are_compared(embedded):
    assert noticed_properties(lambda t: _raise("other"), lambda t: _raise("text")) == {"error text"}


def test_lost_write_is_detected_and_shrunk(embedded):
    statements, _ = generated(7)
    statements[9:9] = ["x = torch.ones(3, device=D)", "faulty(x)"]
    extra = {"faulty": lambda device: (lambda t: t.mul_(2)) if device == "cpu" else lambda t: t.mul_(3)}
    smallest = shrunk(statements, lambda part: "value" in _different_properties(part, extra))
    assert smallest == ["x = torch.ones(3, device=D)", "faulty(x)"]


def _different_properties(statements, extra):
    here = run(statements, "cpu", extra)
    return {d.property for d in differences(statements, here, run(statements, REMOTE, extra))}


def test_wrong_stride_is_detected(embedded, monkeypatch):
    monkeypatch.delitem(meta_overrides._RULES, torch.ops.aten.poisson.default)
    found = first_difference(["a = torch.rand(4, 3, device=D).t()", "b = torch.poisson(a)"])
    assert found is not None
    assert found.difference.property == "stride"


def test_missing_version_increment_is_detected(embedded):
    def write_unnoticed(tensor):
        tensor.detach().data.add_(1)
        return tensor

    assert noticed_properties(write_unnoticed, lambda t: t.add_(1)) == {"version"}
