"""Memory that a template needs: measured in earlier runs, or estimated on the meta device before the first run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
import torch

from djinn_core import torch_private
from djinn_core.logs import get_logger
from djinn_server.memory.lifetimes import Lifetimes, lifetimes_of
from djinn_server.running.compiled_step import CompiledStep, Environment
from djinn_server.running.template_compiler import CompiledTemplate
from djinn_server.running.values import has_memory

UNKNOWN: Final = -1
_GROWTH: Final = 1.25  # figures are valid for inputs that are at most this factor larger
_SMALL_NUMBER: Final = 4096  # numbers up to this value lead to small tensors only
_log = get_logger("djinn.server")


@attrs.define(eq=False)
class TemplateMemory:
    """Memory that a template needs, for inputs of one size.

    Attributes:
        lifetimes: lifetimes of the template's values.
        allocates: bytes of new memory for each step; `UNKNOWN` before its first run.
        input_bytes: bytes of the inputs for which the figures hold.
        slots: numbers that were passed to the template.
        peak: maximum bytes above the bytes at the start of a run; None before a run under a guard.
    """

    lifetimes: Lifetimes
    allocates: list[int]
    input_bytes: int
    slots: Sequence[Any]
    peak: int | None = None

    def fits(self, input_bytes: int, slots: Sequence[Any]) -> bool:
        """Return True if the figures are valid for a run with these slots and inputs of `input_bytes` bytes."""
        if input_bytes > _GROWTH * self.input_bytes:
            return False
        return slots == self.slots or not any(
            _exceeds(now, before) for now, before in zip(slots, self.slots, strict=True)
        )


def template_memory(template: CompiledTemplate, input_bytes: int, slots: Sequence[Any]) -> TemplateMemory:
    """Return the memory figures of a template before its first run. `input_bytes`, `slots`: as in `TemplateMemory`."""
    return TemplateMemory(lifetimes_of(template), [UNKNOWN] * len(template.steps), input_bytes, [*slots])


def bytes_of_inputs(values: Iterable[object]) -> int:
    """Return the bytes of the strided tensors among the values, including evicted tensors."""
    return sum([v.nbytes for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided])


def _exceeds(now: Any, before: Any) -> bool:
    return isinstance(now, int) and isinstance(before, int) and now > _SMALL_NUMBER and now > _GROWTH * before


def bytes_of_step(step: CompiledStep, env: Environment) -> int:
    """Return the bytes of new memory that a step needs, by a run on the meta device.

    The operands must be on the device. For a PyTorch op that cannot run on the meta device, return the bytes that it reads.
    For Djinn's own ops, return 0.
    """
    if not step.op.startswith("aten::"):
        return 0
    shadow = _MetaEnvironment(env)
    storages: dict[int, torch.UntypedStorage] = {}
    for place in step.reads:
        if has_memory(value := env[place]):
            shadow[place] = _meta_like(value, storages)
    before = {torch_private.number_of_storage(storage): storage.nbytes() for storage in storages.values()}
    try:
        with torch.inference_mode():
            step.store(shadow)  # type: ignore[arg-type]
    except Exception as error:
        _log.debug("an op cannot run on the meta device", op=step.op, error=repr(error)[:200])
        return sum(before.values())
    after = dict(before)
    for place in (*step.writes, *[place for _, place in step.makes]):
        if has_memory(value := shadow[place]):
            after[torch_private.storage_key(value)] = value.untyped_storage().nbytes()
    return sum(max(0, nbytes - before.get(key, 0)) for key, nbytes in after.items())


class _MetaEnvironment(dict[int, Any]):
    """The environment of one step, in which tensors are on the meta device and numbers are unchanged."""

    def __init__(self, env: Environment) -> None:
        super().__init__()
        self._env = env

    def __missing__(self, place: int) -> Any:
        value = self._env[place]
        return torch.device("meta") if isinstance(value, torch.device) else value


def _meta_like(value: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return a meta tensor like `value`. If tensors share memory, their meta tensors share it too."""
    key = torch_private.storage_key(value)
    if key not in storages:
        nbytes = value.untyped_storage().nbytes()
        storages[key] = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
    empty = torch.empty(0, dtype=value.dtype, device="meta")
    return empty.set_(storages[key], value.storage_offset(), value.shape, value.stride())
