"""An error shows the lines of the user's program, and none of this package's."""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import pickle
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

import pytest
import torch

import djinn
import djinn_client
import djinn_core
from djinn_client.tracebacks import shorten

OURS = tuple(f"{Path(package.__file__).parent}{os.sep}" for package in (djinn, djinn_client, djinn_core))


def _raised(call):
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def _frames(error):
    return [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def _own_frames(error):
    return [(file, name) for file, name in _frames(error) if file.startswith(OURS)]


class Attention(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x.flatten(2))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x * 2

    @staticmethod
    def backward(_ctx, grad):
        return grad @ grad.new_ones(7, 7)


def _out_of_bounds(device):
    return torch.zeros(3, device=device)[torch.tensor([9], device=device)]


def _print(device):
    wrong = _out_of_bounds(device)
    print(wrong)


def _synchronize(device):
    wrong = _out_of_bounds(device)
    try:
        torch.remote_accelerator.synchronize()
    finally:
        del wrong


MISTAKES = {
    "shapes in a module": lambda d: torch.nn.Sequential(torch.nn.Linear(5, 2)).to(d)(torch.ones(3, 4, device=d)),
    "shapes in attention": lambda d: Attention()(torch.ones(1, 2, 3, 4, device=d)),
    "matmul without gradients": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    "in a backward pass": lambda d: Doubling.apply(torch.ones(2, 3, device=d, requires_grad=True)).sum().backward(),
    "a factory": lambda d: torch.empty(-1, device=d),
    "a wish for numpy": lambda d: torch.ones(2, device=d).numpy(),
    "item": lambda d: _out_of_bounds(d).item(),
    "print": _print,
    "a format": lambda d: f"{_out_of_bounds(d)[0]:.3f}",
    "a copy that does not wait": lambda d: _out_of_bounds(d).to("cpu", non_blocking=True).sum(),
    "synchronize": _synchronize,
    "no such index": lambda _: torch.accelerator.set_device_index(7),
    "an event": lambda _: torch.Event("remote_accelerator", enable_timing=True).elapsed_time(
        torch.Event("remote_accelerator")
    ),
    "settings": lambda _: djinn.configure(no_such_setting=1),
    "the module's own functions": lambda _: djinn.plan(torch.ones(2), until="nowhere"),
    "what a program may not contain": lambda d: torch.ones(2, 2, device=d).to_mkldnn(),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_traceback_contains_only_user_frames(embedded, name):
    error = _raised(lambda: MISTAKES[name](embedded))
    assert _own_frames(error) == []
    assert (__file__, "<lambda>") in _frames(error)
    shown = "".join(traceback.format_exception(error))
    assert "/djinn_client/" not in shown
    assert "/djinn_core/" not in shown
    assert "During handling" not in shown
    assert "direct cause" not in shown
    djinn.synchronize()


def test_interrupted_wait_shows_user_line(embedded):
    x = torch.rand(1200, 1200, device=embedded) / 1200
    djinn.synchronize()
    y = x
    for _ in range(200):
        y = y @ x
    threading.Timer(0.3, _thread.interrupt_main).start()
    error = _raised(lambda: y.sum().item())
    assert isinstance(error, KeyboardInterrupt)
    assert _own_frames(error) == []
    assert _frames(error)[-1] == (__file__, "<lambda>")


def test_traceback_keeps_line_of_user_module(embedded):
    frames = _frames(_raised(lambda: MISTAKES["shapes in attention"](embedded)))
    assert frames[-1] == (__file__, "forward")


def test_traceback_keeps_user_context_only(embedded):
    x = torch.ones(2, 3, device=embedded)

    def while_handling():
        try:
            raise LookupError("the user's")
        except LookupError:
            return x @ x

    error = _raised(while_handling)
    assert isinstance(error.__context__, LookupError)
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback") == 2
    assert "the user's" in shown


def test_traceback_keeps_user_exception_chain(embedded):
    class RaisesFromError(torch.nn.Module):
        def forward(self, x):
            try:
                return x @ x
            except RuntimeError as error:
                raise ValueError("no such product") from error

    error = _raised(lambda: RaisesFromError()(torch.ones(2, 3, device=embedded)))
    assert isinstance(error.__cause__, RuntimeError)
    assert _own_frames(error) == _own_frames(error.__cause__) == []


@pytest.mark.parametrize("part", ["all", "transport"])
def test_traceback_is_full_with_debug_logs(embedded, part):
    before = logging.getLogger("djinn").level
    djinn.compat.set_debug_level(part)
    try:
        assert _own_frames(_raised(lambda: MISTAKES["item"](embedded)))
        assert _own_frames(_raised(lambda: MISTAKES["shapes in a module"](embedded)))
    finally:
        djinn.compat.set_debug_level("off")
    assert logging.getLogger("djinn").level in {before, logging.NOTSET}


def test_internal_error_keeps_package_frames(embedded, monkeypatch):
    from djinn_client.interception.shape_inference.inference_cache import inference_cache

    x = torch.ones(2, 1, 7, 1, 2, device=embedded)  # of a shape that no other test adds: C++ asks Python
    monkeypatch.setattr(inference_cache, "calls", None)
    error = _raised(lambda: x + 1)
    assert isinstance(error, AttributeError)
    assert _own_frames(error)[-1][1] == "record"


def test_error_names_match_public_module():
    errors = [getattr(djinn.errors, name) for name in djinn.errors.__all__]
    assert len(errors) > 20
    for error in errors:
        assert error.__module__ == "djinn.errors", error
        assert getattr(djinn.errors, error.__name__) is error
    stack = [djinn.DjinnError]
    while stack:
        error = stack.pop()
        stack += error.__subclasses__()
        assert error.__module__ != "djinn.errors" or error in errors, f"djinn.errors does not export {error.__name__}"


def test_errors_survive_pickling(embedded):
    error = _raised(lambda: _out_of_bounds(embedded).item())
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) is djinn.errors.RemoteIndexError
    assert (str(again), again.op, again.site) == (str(error), error.op, error.site)
    assert traceback.format_exception_only(error)[0].startswith("djinn.errors.RemoteIndexError: ")
    assert pickle.loads(pickle.dumps(djinn.errors.ServerBusy("full", 2.5))).after == 2.5


def test_interrupt_without_line_number_is_shortened():
    frame = sys._getframe()
    with contextlib.nullcontext():  # whose end has such instructions
        at = next(start for start, _, line in frame.f_code.co_lines() if line is None)
    error = KeyboardInterrupt().with_traceback(TracebackType(None, frame, at, -1))
    shorten(error)
    assert error.__traceback__.tb_frame is frame
    assert error.__traceback__.tb_lineno is None
