"""Tracks the `nn.Module` call that each thread is inside, for `ir.module_path`."""

from __future__ import annotations

import functools
from time import perf_counter
from typing import Any
from weakref import ref

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.native.entries import NODE
from djinn_client.interception.recording.recorder import Recorder, current, current_or_none
from djinn_client.interception.runtime_interface import port
from djinn_client.torch_dispatch import ModuleCallImpl
from djinn_client.tracebacks import shorten_through
from djinn_core.ir.module_path import ModuleCall


def follow_modules(call: ModuleCallImpl) -> ModuleCallImpl:
    """`torch.nn.Module.__call__` that says where its thread is; it costs about half a microsecond a call."""
    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
    next_number = torch_dispatch.next_sequence_number
    usual = torch_dispatch.is_usual_module_call(call)

    @functools.wraps(call)
    def called(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # what follows cannot be compiled, and would be compiled away
            return call(module, *args, **kwargs)
        recorder = current_or_none()
        if recorder is None:
            return call(module, *args, **kwargs)
        outer = recorder.module
        around = at_node(recorder) if outer is None and recorder.differentiating else outer
        recorder.module = inner = (ref(module), around)
        moments = recorder.module_moments
        if moments is not None:
            if outer is None and port.timeline is not None:
                port.timeline.met(module)
            moments.extend((perf_counter(), inner[0]))
        differentiable = is_grad_enabled()
        if differentiable:
            recorder.forward_calls.append(next_number(), inner)
        try:
            if usual and module._compiled_call_impl is None:  # noqa: SLF001 - what `call` does, without its frame
                return module._call_impl(*args, **kwargs)  # noqa: SLF001
            return call(module, *args, **kwargs)
        except BaseException as error:
            shorten_through(error)
            raise
        finally:
            recorder.module = outer
            if differentiable:
                recorder.forward_calls.append(next_number(), around)
            if moments is not None:
                moments.extend((perf_counter(), None))

    return torch_dispatch.not_compiled_itself(called)


def module_now(recorder: Recorder) -> ModuleCall | None:
    """The call of a module that a thread is inside, or the autograd node that it is at."""
    outer = recorder.module
    return at_node(recorder) if outer is None and recorder.differentiating else outer


def at_node(recorder: Recorder) -> ModuleCall:
    """Position of a thread in a backward pass: the autograd node that it is at."""
    number, moments = torch_dispatch.node_sequence_number(), recorder.module_moments
    if moments is not None and moments[-1] != number:
        moments.extend((perf_counter(), number))
    return number, None, recorder.forward_calls


def report_node(node: int) -> None:
    """Note in the timeline that the present thread has reached an autograd node, of which C++ tells."""
    recorder = current()
    if recorder.module is None:
        at_node(recorder)
    recorder.counters[NODE] = node
