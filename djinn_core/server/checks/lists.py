"""Rules for ops whose kernels expect tensor lists of equal length: fused optimizers, recurrent layers."""

from __future__ import annotations

from djinn_core.server.checks.arguments import Arguments, Rule, extent
from djinn_core.wire import limits

_LIKE_PARAMETERS = ("grads", "momentum_buffer_list", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_sums")


def fused_step(a: Arguments) -> None:
    """Whatever there is for a parameter is shaped like it, and dense, because kernels go through it element by element."""
    needed = {"grads", "exp_avgs", "exp_avg_sqs", "state_sums", "state_steps"}
    needed |= {"max_exp_avg_sqs"} if a.amsgrad else set()
    needed |= {"momentum_buffer_list"} if a.momentum else set()
    _dense(a, "self")
    for name in _LIKE_PARAMETERS:
        if name not in a:
            continue
        tensors = a.__getattr__(name)
        _as_many(a, name, needed)
        _dense(a, name)
        for parameter, tensor in zip(a.self, tensors, strict=False):
            a.require(
                tensor.shape == parameter.shape and tensor.dtype == parameter.dtype, f"{name} do not fit the parameters"
            )
    if "state_steps" in a:
        _as_many(a, "state_steps", needed)
        a.require(all(t.numel() == 1 and t.is_floating_point() for t in a.state_steps), "state_steps must be numbers")
    for name in ("grad_scale", "found_inf", "lr"):
        tensor = a.__getattr__(name)
        if hasattr(tensor, "numel"):
            a.count(name, 1)
            a.require(tensor.is_floating_point(), f"{name} must be a number")


def _as_many(a: Arguments, name: str, needed: set[str]) -> None:
    count = len(a.__getattr__(name))
    fits = count == len(a.self) or (count == 0 and name not in needed)
    a.require(fits, f"{name} must be {len(a.self)} tensors, not {count}")


def _dense(a: Arguments, name: str) -> None:
    for tensor in a.__getattr__(name):
        whole = tensor.is_contiguous() or tensor.numel() <= extent(tensor.shape, tensor.stride())
        a.require(
            whole and tensor.is_floating_point(), f"{name} must be floating-point, and have memory for each element"
        )


def recurrent(gates: int, states: int) -> Rule:
    """There are as many weights as layers and directions need."""

    def rule(a: Arguments) -> None:
        a.require(0 < a.num_layers <= limits.LAYERS, f"num_layers must be 1 to {limits.LAYERS}")
        each = (4 if a.has_biases else 2) * a.num_layers * (2 if a.bidirectional else 1)
        projected = each // (4 if a.has_biases else 2) + each if gates == 4 else each
        a.require(len(a.params) in {each, projected}, f"params must be {each} tensors, not {len(a.params)}")
        a.require(states == 1 or len(a.hx) == states, f"hx must be {states} tensors")

    return rule
