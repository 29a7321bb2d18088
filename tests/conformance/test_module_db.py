"""PyTorch's own databases of modules and optimizers: outputs, gradients, steps and errors are the local ones."""

from __future__ import annotations

from long_forms import long_or

from evaluation.conformance.module_database import check_module, check_optimizer, modules, optimizers


def test_modules_equal_local(embedded_for_all):
    part = list(modules())[:: long_or(8, 4)]  # `python -m evaluation conformance` takes all, with every sample
    verdicts = [check_module(module, samples=1) for module in part]
    assert {v.name: v.reason for v in verdicts if v.outcome != "passed"} == {}
    # The comparison itself is alive: so many entries with a sample that the CPU takes.
    assert sum(v.refused < v.samples for v in verdicts) > long_or(12, 25)


def test_optimizers_equal_local(embedded_for_all):
    verdicts = [check_optimizer(optimizer, samples=1) for optimizer in optimizers()]
    assert {v.name: v.reason for v in verdicts if v.outcome != "passed"} == {}
    assert len(verdicts) > 10
