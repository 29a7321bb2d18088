"""Models of a few architectures, unlike each other: outputs, loss, gradients and a training step are the local ones.

All the others: `python -m evaluation zoo`.
"""

from __future__ import annotations

import warnings

import pytest
from long_forms import long_or

from evaluation.zoo.catalogue import SHORT_FORM, ZOO
from evaluation.zoo.likeness import compare

# Three ways of attending, one of convolving, one of recurring and one with an encoder of its own.
SHORTEST = ("llama", "qwen3_moe", "mamba2", "t5", "resnet", "clip")


@pytest.mark.parametrize("name", long_or(SHORTEST, SHORT_FORM))
def test_inference_and_training_step_equal_local(over_tcp, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say about themselves while they are imported
        verdict = compare(ZOO[name])
    assert verdict.ops > 20, "nothing was recorded: nothing is shown"
    assert verdict.forward.close, verdict.forward
    assert verdict.step.close, verdict.step
    assert verdict.tokens is not False, "generate() writes something else"
    assert verdict.tokens is not None or not ZOO[name].writes
