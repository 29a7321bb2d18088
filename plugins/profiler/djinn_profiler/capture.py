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

    Some functions that optimizers call bypass function modes, so the mode alone is not enough.

    Args:
        standing_for: returns the remote tensor for a meta tensor, and any other object unchanged.
    """

    def __init__(self, standing_for: Callable[[Any], Any]) -> None:
        self._standing_for = standing_for
        self._thread = threading.get_ident()
        self._own: dict[int, _OptimizerState] = {}
        self._states: dict[int, Any] = {}  # optimizer state of steps inside the capture
        self._handles: list[RemovableHandle] = []

    def follow(self) -> None:
        """Start to track the optimizer steps of this thread."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def leave(self) -> None:
        """Stop tracking steps, and restore an optimizer whose step failed."""
        for handle in self._handles:
            handle.remove()
        for own in list(self._own.values()):
            self._after(own.optimizer)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        with torch_dispatch.unseen_by_function_modes():
            if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
                self._lend(optimizer)

    def _lend(self, optimizer: Optimizer) -> None:
        own = _OptimizerState(optimizer, [group["params"] for group in optimizer.param_groups], optimizer.state)
        self._own[id(optimizer)] = own
        if id(optimizer) not in self._states:
            lent: dict[Any, Any] = defaultdict(dict)
            lent.update({self._standing_for(p): self._standing_for(state) for p, state in own.state.items()})
            self._states[id(optimizer)] = lent
        optimizer.state = self._states[id(optimizer)]
        for group in optimizer.param_groups:
            group["params"] = [self._standing_for(p) for p in group["params"]]

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        own = self._own.pop(id(optimizer), None)
        if own is None:
            return
        optimizer.state = own.state
        for group, parameters in zip(optimizer.param_groups, own.parameters, strict=True):
            group["params"] = parameters


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# Remote tensors override these functions, which PyTorch calls for all tensors.
_OWN_WAYS: dict[Any, Callable[..., Any]] = {
    getattr(torch.Tensor, name): getattr(LazyTensor, name)
    for name in ("tolist", "numpy", "untyped_storage", "data_ptr", "__format__", "__array__", "__deepcopy__")
} | {
    torch.Tensor.data.__get__: LazyTensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: LazyTensor.data.__set__,  # type: ignore[attr-defined]
}


def _makes_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if this call of `torch.normal` creates a tensor from a size.

    Other calls take tensors, so `torch.device` as a context ignores `torch.normal`.
    """
    return (len(args) > 2 or "size" in kwargs) and not kwargs.keys() & {"device", "out"}


class MetaSubstitution(TorchFunctionMode):
    """Function mode that replaces meta tensors with remote tensors in calls.

    Modules that are being moved (`to_empty`) are left unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, tuple[torch.Tensor, LazyTensor]] = {}
        self._originals: dict[int, torch.Tensor] = {}
        self._storages: dict[int, Storage] = {}
        self._steps = OptimizerSteps(self._standing_for)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with remote tensors in place of meta tensors."""
        del types
        if device_state.thread.converts_module:
            return func(*args, **(kwargs or {}))
        args = tuple([self._standing_for(a) for a in args])
        kwargs = {name: self._standing_for(a) for name, a in kwargs.items()} if kwargs else {}
        if func is torch.normal and _makes_normal(args, kwargs):
            kwargs["device"] = logical_device(0)
        if args and isinstance(args[0], LazyTensor):
            func = _OWN_WAYS.get(func, func)
        result = func(*args, **kwargs)
        # An in-place op returns its tensor: `module.buffer += 1` must leave the module its original buffer.
        return self._originals.get(id(result), result)

    def __enter__(self) -> Self:
        self._steps.follow()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *ended: object) -> None:
        super().__exit__(*ended)  # type: ignore[no-untyped-call]
        self._steps.leave()

    def let_go(self) -> None:
        """Forget all replacements, because the capture has ended."""
        self._tensors.clear()
        self._originals.clear()
        self._storages.clear()

    def _standing_for(self, argument: Any) -> Any:
        kind = type(argument)
        if kind in _PLAIN:
            return self._stand_in(argument) if argument.is_meta else argument
        if kind is list or kind is tuple:
            return kind([self._standing_for(a) for a in argument])
        if kind is dict:
            return {name: self._standing_for(a) for name, a in argument.items()}
        return argument

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._tensors.get(id(tensor))
        if known is None:
            known = self._tensors[id(tensor)] = tensor, self._made(tensor)
            self._originals[id(known[1])] = tensor
        return known[1]

    def _made(self, tensor: torch.Tensor) -> LazyTensor:
        key = torch_private.storage_key(tensor)
        is_first = key not in self._storages
        if is_first:
            self._storages[key] = Storage.begin(tensor.untyped_storage().nbytes())
        with torch.inference_mode(tensor.is_inference()):
            value = Value.begin(self._storages[key], meta_of(tensor))
            stand_in = wrap(value)
        if is_first:
            with port.lock:  # looked up each time: a forked child has a new recorder
                recorders.meta_only.add(value.storage.id)
        if tensor.requires_grad:
            stand_in.requires_grad_()
        return stand_in


class Capture:
    """A capture that is active or finished."""

    def __init__(self, skip: int) -> None:
        self._skip = skip  # instructions recorded but not sent before the capture began
        self.sent = SentEntries()
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        """Return the program recorded so far; fixed when the capture ends."""
        if self._program is not None:
            return self._program
        return freeze([*self.sent.entries, *current().entries][self._skip :], handles_to_free())

    def finish(self) -> None:
        """Fix the program."""
        self._program = self.program


@contextmanager
def capturing() -> Iterator[Capture]:
    """Context manager that records the ops of this thread inside the block.

    Factories without a device argument create remote tensors. Nothing is sent unless the code inside needs a result.
    Recorded ops run later, when code outside needs their results. Ops on meta tensors are recorded and never run.
    """
    recorder = current()
    capture, stand_ins = Capture(recorder.unsent), MetaSubstitution()
    recorder.captures.append(capture.sent)
    before, recorder.fixed = recorder.fixed, recorder.entries[-1] if recorder.unsent else None
    try:
        with torch.device(logical_device(0)), stand_ins:
            yield capture
    finally:
        capture.finish()
        stand_ins.let_go()
        recorder.fixed = before
        recorder.captures = [c for c in recorder.captures if c is not capture.sent]
