"""PyTorch's own databases of modules and optimizers: outputs, gradients and steps are the local ones."""

from __future__ import annotations

from module_database import check_module, check_optimizer, modules, optimizers

SAMPLES = 2

# Their samples are float64 inside, which the CPU refuses to mix with float32.
NOTHING_TO_COMPARE = {"nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"}


def test_every_module_is_right(embedded_for_all):
    verdicts = [check_module(module, samples=SAMPLES) for module in modules()]
    assert {v.name: v.reason for v in verdicts if v.outcome == "failed"} == {}
    assert {v.name for v in verdicts if v.outcome == "left out"} == NOTHING_TO_COMPARE
    assert len(verdicts) > 100


def test_every_optimizer_is_right(embedded_for_all):
    verdicts = [check_optimizer(optimizer, samples=SAMPLES) for optimizer in optimizers()]
    assert {v.name: v.reason for v in verdicts if v.outcome != "passed"} == {}
    assert len(verdicts) > 10
