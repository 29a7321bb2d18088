"""Substitution of meta tensors inside a capture: remote tensors stand for them, so that ops on them are recorded.

A model that was built under `torch.device("meta")` has no data. Inside a capture every PyTorch function that is called with
such a tensor gets a remote one of the same metadata in its place, so that kernels, attention and autograd are chosen as for
the remote device. The model itself is not changed. The results are `absent`: recorded, and never sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from djinn_core import torch_private
from djinn_core.interception.device.device_state import device_state
from djinn_core.interception.recording.optimizer_steps import OptimizerSteps
from djinn_core.interception.recording.recorder import recorders
from djinn_core.interception.tensors.lazy_tensor import LazyTensor, logical_device, wrap
from djinn_core.interception.tensors.storage import Storage, Value
from djinn_core.ir.values import meta_of

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# What remote tensors do in a way of their own, by what PyTorch calls for all tensors.
_OWN_WAYS: dict[Any, Callable[..., Any]] = {
    getattr(torch.Tensor, name): getattr(LazyTensor, name)
    for name in ("tolist", "numpy", "untyped_storage", "data_ptr", "__format__", "__array__", "__deepcopy__")
} | {
    torch.Tensor.data.__get__: LazyTensor.data.__get__,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: LazyTensor.data.__set__,  # type: ignore[attr-defined]
}


def _makes_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if this call of `torch.normal` makes a tensor from a size.

    Other calls do not, and `torch.device` as a context ignores `torch.normal` for that reason.
    """
    return (len(args) > 2 or "size" in kwargs) and not kwargs.keys() & {"device", "out"}


class MetaSubstitution(TorchFunctionMode):
    """While it is entered, functions see remote tensors where they are given tensors on the meta device.

    Modules that are being moved (`to_empty`) are left alone.
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
        """Call `func` with stand-ins."""
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
        # What writes into a tensor returns it: `module.buffer += 1` leaves the module with the buffer that it had.
        return self._originals.get(id(result), result)

    def __enter__(self) -> Self:
        self._steps.follow()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *ended: object) -> None:
        super().__exit__(*ended)  # type: ignore[no-untyped-call]
        self._steps.leave()

    def let_go(self) -> None:
        """The capture is over, and its program is fixed: nothing stands for anything any more."""
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
        if key not in self._storages:
            storage = self._storages[key] = Storage.begin(tensor.untyped_storage().nbytes(), None)
            with recorders.sending:  # looked up each time: a forked child has a new one
                recorders.absent.add(storage.id)
        with torch.inference_mode(tensor.is_inference()):
            stand_in = wrap(Value.begin(self._storages[key], meta_of(tensor)))
        if tensor.requires_grad:
            stand_in.requires_grad_()
        return stand_in
