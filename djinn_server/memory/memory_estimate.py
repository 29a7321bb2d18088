"""Memory estimate of a template from a run on the meta device: bytes allocated by step, and aliasing between values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from djinn_core import torch_private
from djinn_core.logs import get_logger
from djinn_server.memory.lifetimes import Lifetimes, lifetimes_of
from djinn_server.running.compiled_step import CompiledStep, Environment
from djinn_server.running.template_compiler import CompiledTemplate

_GROWTH = 1.25  # how much larger inputs may be than those of the estimate before it is made again
_SMALL_NUMBER = 4096  # slots below it make no tensor that matters, whatever they have become
_log = get_logger("djinn.server")


@attrs.frozen(eq=False)
class MemoryEstimate:
    """The memory that a run is expected to use.

    Attributes:
        lifetimes: of its values.
        allocates: bytes of new memory, by step; observed runs replace them with measured values.
        roots: by position the number of the memory that the value is a view of; -1 if that is unknown.
        writes: by number of memory the steps that write to it; -1: to unknown memory.
        guessed: the steps for which `allocates` is a guess.
        peak: the most bytes that are held at once beyond those held before the run.
        input_bytes: size of the inputs, each as a tensor of its own (`bytes_of_inputs`).
        slots: values of the slots.
    """

    lifetimes: Lifetimes
    allocates: list[int]
    roots: Mapping[int, int]
    writes: Mapping[int, Sequence[int]]
    guessed: frozenset[int]
    peak: int
    input_bytes: int
    slots: Sequence[Any]

    def fits(self, input_bytes: int, slots: Sequence[Any]) -> bool:
        """True if the estimate holds for a run with inputs of that size and these slots."""
        if input_bytes > _GROWTH * self.input_bytes:
            return False
        return slots == self.slots or not any(_grown(now, then) for now, then in zip(slots, self.slots, strict=True))

    def written_inputs(self) -> set[int]:
        """Positions of the inputs whose memory the template writes into, or may write into."""
        first = self.lifetimes.first_input
        inputs = [place for place in self.roots if place not in self.lifetimes.made_by and place >= first]
        if -1 in self.writes:
            return set(inputs)
        return {place for place in inputs if self.roots[place] in self.writes}

    def is_written(self, root: int, after: int, before: int) -> bool:
        """True if a step between these two may write to that memory."""
        return any(after < step < before for key in (root, -1) for step in self.writes.get(key, ()))


def unknown_memory(template: CompiledTemplate) -> MemoryEstimate:
    """The estimate of a run of which nothing is known but when its values are used."""
    return MemoryEstimate(lifetimes_of(template), [0] * template.count, {}, {}, frozenset(), 0, 0, ())


def bytes_of_inputs(values: Iterable[object]) -> int:
    """Bytes of those of these values that are strided tensors; where their memory was evicted as well."""
    return sum([v.nbytes for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided])


def _grown(now: Any, then: Any) -> bool:
    return isinstance(now, int) and isinstance(then, int) and now > _SMALL_NUMBER and now > _GROWTH * then


def estimate_memory(template: CompiledTemplate, env: Environment, sizes: Mapping[int, int]) -> MemoryEstimate:
    """Run a template on the meta device.

    Args:
        template: what will run.
        env: the environment that it will run in.
        sizes: bytes of the memory of inputs that are evicted, by its key: their tensors have none.
    """
    return _EstimateRun(template, env, sizes).estimate()


def bytes_of_step(step: CompiledStep, env: Environment) -> int | None:
    """Bytes of new memory that a step takes whose operands are in memory; None if that cannot be known without data."""
    if not step.op.startswith("aten::"):
        return None
    shadow: Environment = [torch.device("meta") if isinstance(v, torch.device) else v for v in env]
    storages: dict[int, torch.UntypedStorage] = {}
    for place in step.reads:
        value = env[place]
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            shadow[place] = _stand_in(value, value.untyped_storage().nbytes(), storages)
    try:
        step.store(shadow)
    except Exception as error:
        _log.debug("an op cannot be looked at on the meta device", op=step.op, error=repr(error)[:200])
        return None
    known = {torch_private.number_of_storage(storage) for storage in storages.values()}
    made: dict[int, int] = {}
    for _, place in step.makes:
        if isinstance(shadow[place], torch.Tensor):
            made[torch_private.storage_key(shadow[place])] = shadow[place].untyped_storage().nbytes()
    return sum(nbytes for key, nbytes in made.items() if key not in known)


def _stand_in(value: torch.Tensor, nbytes: int, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A tensor on the meta device in the place of another; those that share memory go on doing so, over `storages`."""
    key = torch_private.storage_key(value)
    if key not in storages:
        storages[key] = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
    empty = torch.empty(0, dtype=value.dtype, device="meta")
    return empty.set_(storages[key], value.storage_offset(), value.shape, value.stride())


class _EstimateRun:
    def __init__(self, template: CompiledTemplate, env: Environment, sizes: Mapping[int, int]) -> None:
        self.template = template
        self.lifetimes = lifetimes_of(template)
        self.slots = env[len(template.constants) : self.lifetimes.first_input]
        self.keys: dict[int, int] = {}  # storages on the meta device, by their number there
        self.roots: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.looking: dict[int, int] = {}  # how many places look into a root
        self.writes: dict[int, list[int]] = {}
        self.allocates: list[int] = []
        self.env: Environment = [torch.device("meta") if isinstance(v, torch.device) else v for v in env]
        first = self.lifetimes.first_input
        self.input_bytes = bytes_of_inputs(env[first : first + template.inputs])
        self._stand_in(env, sizes)
        self.given = len(self.keys)  # roots below it are memory of inputs, which others may hold as well
        self.kept: list[torch.UntypedStorage] = []  # whose numbers must not be given out again
        self.live = self.peak = 0
        self.guessed: set[int] = set()

    def _stand_in(self, env: Environment, sizes: Mapping[int, int]) -> None:
        """Put tensors without memory in the place of the inputs."""
        storages: dict[int, torch.UntypedStorage] = {}
        first = self.lifetimes.first_input
        for place in range(first, first + self.template.inputs):
            value = env[place]
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            nbytes = max(sizes.get(torch_private.storage_key(value), 0), value.untyped_storage().nbytes())
            self.env[place] = _stand_in(value, nbytes, storages)
            self._look(place, self.env[place])
        self.storages = storages

    def _look(self, place: int, tensor: torch.Tensor) -> int:
        """Note which memory the value at a place is a view of; the bytes of that memory where it is new, else 0."""
        key = torch_private.storage_key(tensor)
        new = key not in self.keys
        root = self.keys.setdefault(key, len(self.keys))
        self.roots[place] = root
        self.looking[root] = self.looking.get(root, 0) + 1
        if new:
            self.sizes[root] = tensor.untyped_storage().nbytes()
        return self.sizes[root] if new else 0

    def estimate(self) -> MemoryEstimate:
        with torch.inference_mode():
            for index, step in enumerate(self.template.steps):
                self._step(index, step)
        if self.guessed:
            _log.debug("the memory of some ops cannot be foreseen", ops=len(self.guessed))
        return MemoryEstimate(
            self.lifetimes,
            self.allocates,
            self.roots,
            self.writes,
            frozenset(self.guessed),
            self.peak,
            self.input_bytes,
            list(self.slots),
        )

    def _step(self, index: int, step: CompiledStep) -> None:
        known = step.op.startswith("aten::") and all(self.roots.get(place, 0) >= 0 for place in step.reads)
        taken = self._run(step) if known else None
        for place in step.writes:
            self.writes.setdefault(self.roots.get(place, -1), []).append(index)
        if taken is None:
            taken = self._guess(step)
            self.guessed.add(index)
        self.allocates.append(taken)
        self.live += taken
        self.peak = max(self.peak, self.live)
        for place in step.release:
            self._release(place)

    def _guess(self, step: CompiledStep) -> int:
        """Guess the allocation of a step that cannot run on the meta device: as much as it reads. Djinn's own ops take little."""
        for _, place in step.makes:
            self.env[place] = None
            self.roots[place] = -1
        if not step.op.startswith("aten::"):
            return 0
        return sum({r: self.sizes[r] for p in step.reads if (r := self.roots.get(p, -1)) >= 0}.values())

    def _run(self, step: CompiledStep) -> int | None:
        """Run a step; the bytes that it takes, or None if that cannot be known without data."""
        before = {root: self.sizes[root] for place in step.writes if (root := self.roots.get(place, -1)) >= 0}
        try:
            step.store(self.env)
        except Exception as error:
            _log.debug("an op cannot be looked at on the meta device", op=step.op, error=repr(error)[:200])
            return None
        taken = 0
        for _, place in step.makes:
            value = self.env[place]
            if isinstance(value, torch.Tensor):
                taken += self._look(place, value)
        return taken + self._grown(step, before)

    def _grown(self, step: CompiledStep, before: Mapping[int, int]) -> int:
        """Bytes by which the memory grew that a step resized."""
        grown = 0
        for place in step.writes:
            root, value = self.roots.get(place, -1), self.env[place]
            if root in before and isinstance(value, torch.Tensor):
                nbytes = value.untyped_storage().nbytes()
                grown += max(0, nbytes - self.sizes[root])
                self.sizes[root] = max(nbytes, self.sizes[root])
        return grown

    def _release(self, place: int) -> None:
        root = self.roots.get(place, -1)
        value, self.env[place] = self.env[place], None
        if root < 0:
            return
        if isinstance(value, torch.Tensor):
            self.kept.append(value.untyped_storage())
        self.looking[root] -= 1
        if not self.looking[root] and root >= self.given:
            self.live -= self.sizes[root]
