"""Training follows the same loss curve here and on a server; all optimizers, and longer: `python -m evaluation curves`."""

from __future__ import annotations

import pytest
import torch
from long_forms import long_or

import djinn
from evaluation.zoo.curves import OPTIMIZERS, compare_runs, digits, prose, train
from evaluation.zoo.likeness import REMOTE


@pytest.fixture(scope="module")
def cnn():
    return digits()


@pytest.mark.parametrize("optimizer", ["sgd with momentum", "adamw, foreach"])
def test_cnn_loss_curve_equals_local(over_tcp, cnn, optimizer):
    found = compare_runs(cnn, optimizer, long_or(24, 60))
    assert found.equal, found
    assert found.bitwise, found  # the same kernels here and there


def test_cnn_loss_curve_under_autocast_equals_local(over_tcp, cnn):
    found = compare_runs(cnn, "adamw, fused", long_or(12, 30), bf16=True)
    assert found.equal, found
    assert found.bitwise, found  # both policies cast the same ops of this network


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpt_loss_curve_equals_local(over_tcp, attention):
    found = compare_runs(prose(attention), "adamw, fused", long_or(8, 20))
    assert found.equal, found
    assert found.bitwise, found  # fused attention is the same kernel here and there


def test_training_needs_no_round_trips(over_tcp, cnn):
    for _ in range(2):
        djinn.synchronize()
        djinn.reset_stats()
        train(cnn, OPTIMIZERS["adam"], long_or(12, 30), REMOTE, torch.enable_grad())
    parameters = len(cnn.model.state_dict())
    assert djinn.stats()["round_trips"] == 1 + parameters, "one for the losses, one for each parameter"
