"""CPU fallback for ops without remote support, if the setting `client_fallback` is on.

Operands are fetched, the op runs on the client's CPU, and its results are uploaded. Calls are counted, and each op is logged
once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from djinn_client.interception.handler_support import (
    DEVICE_NAME,
    LazyTensor,
    ask_executor,
    fetch,
    index_of,
    record,
    upload_copy,
    written_operands,
)
from djinn_client.runtime.context import context
from djinn_client.sink import OpHandler
from djinn_client.torch_dispatch import CGenerator
from djinn_core.errors import RemoteError, RemoteNotImplementedError, UnsupportedOperation
from djinn_core.ir.program import Slot
from djinn_core.logs import get_logger
from djinn_core.torch_private import schema_of, storage_key

log = get_logger("djinn.fallback")
aten = torch.ops.aten


class ClientFallback(OpHandler):
    """Op handler that runs ops on the client's CPU."""

    name = "fallback"

    def __init__(self) -> None:
        self._needed: dict[object, bool] = {}
        self._logged_ops: set[str] = set()

    def needed(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: list[LazyTensor],
        slots: tuple[Slot, ...],
    ) -> bool:
        """Return True if the executor does not support this kind of call, as `OpHandler.needed`.

        For each new kind of call, the executor tries the op once, in one round trip.
        """
        if not operands or func.is_view or torch.Tag.nondeterministic_seeded in func.tags or _returns_list(func):
            return False
        kind = func, tuple((o.dtype, o.dim()) for o in operands), tuple(kwargs)
        is_needed = self._needed.get(kind)
        if is_needed is None:
            is_needed = self._needed[kind] = self._lacks_kernel(func, args, kwargs, operands, slots)
        return is_needed

    def _lacks_kernel(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operands: list[LazyTensor],
        slots: tuple[Slot, ...],
    ) -> bool:
        try:
            with torch.no_grad():
                # If the op writes operands, try it on copies: a failure must not change them, and a success must not apply twice.
                trial_operands: Any = (
                    [o.detach().clone() for o in operands] if _written(func, args, kwargs) else operands
                )
            ask_executor(func, args, kwargs, trial_operands, slots)
        except UnsupportedOperation as error:
            if isinstance(error, RemoteNotImplementedError) and error.op != func.name():
                return False  # an earlier op failed, and reports its error when its result is used
            self._warn_once(func, str(error))
            return True
        except RemoteError as error:
            log.debug("an op failed for another reason than a missing kernel", op=func.name(), reason=str(error))
        return False

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op on this machine's CPU, and return its results as remote tensors.

        Raises:
            UnsupportedOperation: a result shares memory with an operand, or is not a strided tensor.
            Exception: the op failed on the CPU.
        """
        self._warn_once(func, "the op is not on the allow-list")
        context.stats.client_fallbacks += 1
        copies = _CpuCopies(func)
        with torch.no_grad(), torch.device("cpu"):
            out = func(*copies.bring(args), **{name: copies.bring(value) for name, value in kwargs.items()})
            for operand in _written(func, args, kwargs):
                record(
                    aten.copy_.default, (operand, upload_copy(copies.bring(operand), operand.remote.meta.device)), {}
                )
            return copies.send(out)

    def _warn_once(self, func: Any, reason: str) -> None:
        if func.name() not in self._logged_ops:
            self._logged_ops.add(func.name())
            log.warning("the executor cannot run an op, this machine computes it", op=func.name(), reason=reason)


class _CpuCopies:
    """CPU copies of the remote operands of one op."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self._pairs: list[tuple[LazyTensor, torch.Tensor]] = []
        self._named_device: int | None = None

    def bring(self, argument: Any) -> Any:
        """Return `argument` with CPU copies in place of remote tensors, and the CPU in place of a device."""
        if isinstance(argument, LazyTensor):
            return self._fetched(argument)
        if isinstance(argument, (list, tuple)):
            return [self.bring(a) for a in argument]
        if isinstance(argument, torch.device):
            self._named_device = index_of(argument)
            return torch.device("cpu")
        return argument

    @property
    def _result_device(self) -> int:
        """Return the logical device of the results: the device that the call names, or else the first operand's device."""
        return self._pairs[0][0].remote.meta.device if self._named_device is None else self._named_device

    def _fetched(self, remote: LazyTensor) -> torch.Tensor:
        local = next((here for there, here in self._pairs if there is remote), None)
        if local is None:
            local = fetch(remote).clone()
            self._pairs.append((remote, local))
        return local

    def send(self, out: Any) -> Any:
        """Return `out` with remote tensors in place of CPU tensors. If the op returns an operand, return its remote tensor.

        Raises:
            UnsupportedOperation: a result shares memory with an operand, or is not a strided tensor.
        """
        if isinstance(out, (list, tuple)):
            return type(out)(self.send(o) for o in out)
        if not isinstance(out, torch.Tensor):
            return out
        same = next((remote for remote, here in self._pairs if here is out), None)
        if same is not None:
            return same
        if out.layout != torch.strided or any(storage_key(here) == storage_key(out) for _, here in self._pairs):
            raise UnsupportedOperation(
                f"client_fallback cannot compute {self._func.name()} for {DEVICE_NAME}, because its result shares memory with an operand or "
                f"has the layout {out.layout}: call it on tensors that were moved with .cpu()"
            )
        return upload_copy(out, self._result_device)


def _returns_list(func: Any) -> bool:
    return any(str(r.type) == "List[Tensor]" for r in schema_of(func).returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[LazyTensor]:
    operands = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, (LazyTensor, CGenerator))]
    targets = [operands[position] for position in written_operands(func, args, kwargs)]
    return [operand for operand in targets if isinstance(operand, LazyTensor)]
