"""Position of each thread: the current `nn.Module` call, for `ir.module_path`, and the current backward pass."""

from __future__ import annotations

import functools
from typing import Any
from weakref import ref

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.recording.recorder import Recorder, current_or_none, recorders
from djinn_client.interception.tap import taps
from djinn_client.torch_dispatch import EngineRun, ModuleCallImpl
from djinn_client.tracebacks import shorten_through
from djinn_core.errors import ForkedProcess
from djinn_core.ir.module_path import BACKWARD, ModuleCall


def follow_modules(call: ModuleCallImpl) -> ModuleCallImpl:
    """Return a replacement of `torch.nn.Module.__call__` that tracks the current module.

    A decode step of a language model calls hundreds of modules, so the code is inlined.
    """
    is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
    next_number = torch_dispatch.next_sequence_number
    usual = torch_dispatch.is_usual_module_call(call)

    @functools.wraps(call)
    def called(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # the tracking code cannot be compiled, and compilation would remove it
            return call(module, *args, **kwargs)
        try:
            recorder = recorders.thread.recorder
        except ForkedProcess:
            return call(module, *args, **kwargs)
        around = outer = recorder.module
        if outer is None and recorder.differentiating:
            around = at_node(recorder)
        recorder.moments[recorder.counters[0]] = recorder.module = inner = (ref(module), around)
        differentiable = is_grad_enabled()
        if differentiable:
            recorder.forward_calls.append(next_number(), inner)
        for notify in taps.module:
            notify(inner[0])
        try:
            if usual and module._compiled_call_impl is None:  # noqa: SLF001 - what `call` does, without its frame
                return module._call_impl(*args, **kwargs)  # noqa: SLF001
            return call(module, *args, **kwargs)
        except BaseException as error:
            shorten_through(error)
            raise
        finally:
            recorder.moments[recorder.counters[0]] = recorder.module = outer
            if differentiable:
                recorder.forward_calls.append(next_number(), around)
            for notify in taps.module:
                notify(None)

    return torch_dispatch.not_compiled_itself(called)


def current_module(recorder: Recorder) -> ModuleCall | None:
    """Return the module call that a thread is inside, its current autograd node, or None outside of both."""
    outer = recorder.module
    return at_node(recorder) if outer is None and recorder.differentiating else outer


def at_node(recorder: Recorder) -> ModuleCall:
    """Return a thread's position in a backward pass: its current autograd node."""
    return torch_dispatch.node_sequence_number(), None, recorder.forward_calls


def guard_engine(run: EngineRun) -> EngineRun:
    """Return a wrapper of the autograd engine's entry that keeps ops in order.

    Multithreading is off for the run, because a program belongs to one thread.
    """

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        recorder = current_or_none()
        if recorder is None:
            return run(*args, **kwargs)
        outer = recorder.differentiating, recorder.module
        recorder.differentiating = True
        recorder.move_to(None)
        for notify in taps.module:
            notify(BACKWARD)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return run(*args, **kwargs)
        except BaseException as error:
            shorten_through(error)
            raise
        finally:
            recorder.differentiating, module = outer
            recorder.move_to(module)
            for notify in taps.module:
                notify(None)

    return guarded
