"""`capture()`: record the ops of a block as a program without running it.

A model that was built under `torch.device("meta")` has no data. Inside a capture, every PyTorch function gets a remote
tensor with the same metadata in place of a meta tensor. PyTorch then chooses kernels, attention and autograd as for the
remote device. The model itself is not changed. The results have no data (`MetaOnlyStorages`): they are recorded, and
never sent. Optimizers of such a model update the remote tensors, with separate optimizer state.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import attrs
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from djinn_client import torch_dispatch
from djinn_client.interception.device.device_state import device_state
from djinn_client.interception.recording.entry import SentEntries
from djinn_client.interception.recording.recorder import current, freeze, recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, logical_device, wrap
from djinn_client.interception.tensors.storage import Storage, Value, handles_to_free
from djinn_core import torch_private
from djinn_core.ir.program import Program
from djinn_core.ir.values import meta_of


@attrs.frozen
class _OptimizerState:
    """An optimizer's original parameters by group, and its original state, to restore after a step."""

    optimizer: Optimizer
    parameters: list[Any]
    state: Any


class OptimizerSteps:
    """Replace an optimizer's parameters by remote tensors during a step, and restore them afterwards.

    `MetaSubstitution` alone is not enough, because optimizers call some functions that bypass function modes.

    Args:
        substitute: returns the remote tensor for a meta tensor, and any other object unchanged.
    """

    def __init__(self, substitute: Callable[[Any], Any]) -> None:
        self._substitute = substitute
        self._thread = threading.get_ident()
        self._replaced_states: dict[int, _OptimizerState] = {}
        self._remote_states: dict[int, Any] = {}  # optimizer state of steps inside the capture
        self._handles: list[RemovableHandle] = []

    def start_tracking(self) -> None:
        """Start to track this thread's optimizer steps."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def stop_tracking(self) -> None:
        """Stop tracking steps, and restore an optimizer whose step failed."""
        for handle in self._handles:
            handle.remove()
        for original in list(self._replaced_states.values()):
            self._after_step(original.optimizer)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        with torch_dispatch.unseen_by_function_modes():
            if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
                self._replace_parameters(optimizer)

    def _replace_parameters(self, optimizer: Optimizer) -> None:
        original = _OptimizerState(optimizer, [group["params"] for group in optimizer.param_groups], optimizer.state)
        self._replaced_states[id(optimizer)] = original
        if id(optimizer) not in self._remote_states:
            remote_state: dict[Any, Any] = defaultdict(dict)
            remote_state.update({self._substitute(p): self._substitute(state) for p, state in original.state.items()})
            self._remote_states[id(optimizer)] = remote_state
        optimizer.state = self._remote_states[id(optimizer)]
        for group in optimizer.param_groups:
            group["params"] = [self._substitute(p) for p in group["params"]]

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        original = self._replaced_states.pop(id(optimizer), None)
        if original is None:
            return
        optimizer.state = original.state
        for group, parameters in zip(optimizer.param_groups, original.parameters, strict=True):
            group["params"] = parameters


_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Remote tensors override these functions, which PyTorch calls for all tensors.
_OVERRIDES: dict[Any, Callable[..., Any]] = {
    getattr(torch.Tensor, name): getattr(LazyTensor, name)
    for name in ("tolist", "numpy", "untyped_storage", "data_ptr", "__format__", "__array__", "__deepcopy__")
} | {
    torch.Tensor.data.__get__: LazyTensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: LazyTensor.data.__set__,  # type: ignore[attr-defined]
}


def _is_normal_factory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if this call of `torch.normal` creates a tensor from a size, and names neither `device` nor `out`.

    PyTorch never applies `with torch.device(...)` to `torch.normal`, because other calls of it take tensors.
    """
    return (len(args) > 2 or "size" in kwargs) and not kwargs.keys() & {"device", "out"}


class MetaSubstitution(TorchFunctionMode):
    """Function mode that replaces meta tensors with remote tensors in calls.

    It replaces nothing while a module is being moved (`to_empty`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, tuple[torch.Tensor, LazyTensor]] = {}
        self._originals: dict[int, torch.Tensor] = {}
        self._storages: dict[int, Storage] = {}
        self._steps = OptimizerSteps(self._substitute)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with remote tensors in place of meta tensors."""
        del types
        if device_state.thread.converts_module:
            return func(*args, **(kwargs or {}))
        args = tuple([self._substitute(a) for a in args])
        kwargs = {name: self._substitute(a) for name, a in kwargs.items()} if kwargs else {}
        if func is torch.normal and _is_normal_factory(args, kwargs):
            kwargs["device"] = logical_device(0)
        if args and isinstance(args[0], LazyTensor):
            func = _OVERRIDES.get(func, func)
        result = func(*args, **kwargs)
        # An in-place op returns its tensor: `module.buffer += 1` must leave the module its original buffer.
        return self._originals.get(id(result), result)

    def __enter__(self) -> Self:
        self._steps.start_tracking()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._steps.stop_tracking()

    def clear(self) -> None:
        """Forget all replacements. Call this after the capture has ended."""
        self._tensors.clear()
        self._originals.clear()
        self._storages.clear()

    def _substitute(self, argument: Any) -> Any:
        kind = type(argument)
        if kind in _TENSOR_TYPES:
            return self._remote_tensor(argument) if argument.is_meta else argument
        if kind is list or kind is tuple:
            return kind([self._substitute(a) for a in argument])
        if kind is dict:
            return {name: self._substitute(a) for name, a in argument.items()}
        return argument

    def _remote_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        entry = self._tensors.get(id(tensor))
        if entry is None:
            entry = self._tensors[id(tensor)] = tensor, self._create_remote_tensor(tensor)
            self._originals[id(entry[1])] = tensor
        return entry[1]

    def _create_remote_tensor(self, tensor: torch.Tensor) -> LazyTensor:
        key = torch_private.storage_key(tensor)
        is_first = key not in self._storages
        if is_first:
            self._storages[key] = Storage.begin(tensor.untyped_storage().nbytes())
        with torch.inference_mode(tensor.is_inference()):
            value = Value.begin(self._storages[key], meta_of(tensor))
            remote = wrap(value)
        if is_first:
            with port.lock:  # looked up each time: a forked child has a new recorder
                recorders.meta_only.add(value.storage.id)
        if tensor.requires_grad:
            remote.requires_grad_()
        return remote


class Capture:
    """The recording of a capture, which is active or has ended."""

    def __init__(self, skip: int) -> None:
        self._skip = skip  # instructions recorded but not sent before the capture began
        self.sent = SentEntries()
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        """Return the program that was recorded so far. It does not change after `freeze_program`."""
        if self._program is not None:
            return self._program
        return freeze([*self.sent.entries, *current().entries][self._skip :], handles_to_free())

    def freeze_program(self) -> None:
        """Keep the present program, because the capture ends."""
        self._program = self.program


@contextmanager
def capturing() -> Iterator[Capture]:
    """Context manager that records the ops of this thread inside the block.

    Factories without a device argument create remote tensors. Nothing is sent unless the block needs a result.
    Recorded ops run after the block, when their results are needed. Ops on meta tensors are recorded and never run.
    """
    recorder = current()
    capture, substitution = Capture(recorder.unsent), MetaSubstitution()
    recorder.captures.append(capture.sent)
    fixed_before, recorder.fixed = recorder.fixed, recorder.entries[-1] if recorder.unsent else None
    try:
        with torch.device(logical_device(0)), substitution:
            yield capture
    finally:
        capture.freeze_program()
        substitution.clear()
        recorder.fixed = fixed_before
        recorder.captures = [c for c in recorder.captures if c is not capture.sent]
