"""Path of the module that issued an instruction, such as `transformer.h.3.attn`.

A call of a module is a link of a chain, from the innermost call outwards. Links are plain tuples, because every call of
a module creates a link. Names are looked up only on request.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import attrs
import torch

CALLS_REMEMBERED = 16384  # number of module entries and exits per thread that backward passes can be traced back to
BACKWARD: Final = "backward"  # the thread's current call while the autograd engine runs
_NO_NODE = 1 << 63  # no op has these sequence numbers: nodes that accumulate gradients have the largest


class ForwardCalls:
    """Module calls of a thread, each with the first autograd sequence number inside it.

    One thread appends, with increasing numbers. Any thread may read.

    Attributes:
        dropped_calls: older calls, which only a timeline needs. None if `collect_dropped` was never called.
    """

    threads: ClassVar[weakref.WeakSet[ForwardCalls]] = weakref.WeakSet()
    __slots__ = ("__weakref__", "_max_parts", "_recent_calls", "dropped_calls")

    def __init__(self) -> None:
        self._recent_calls: tuple[list[int], list[ModuleCall | None]] = [], []
        self.dropped_calls: list[tuple[list[int], list[ModuleCall | None]]] | None = None
        self._max_parts = sys.maxsize  # number of parts
        self.threads.add(self)

    def collect_dropped(self) -> None:
        """Collect dropped calls in `dropped_calls` from now on."""
        self.dropped_calls, self._max_parts = [], sys.maxsize

    def stop_collecting_dropped(self) -> None:
        """Stop collecting dropped calls. The calls in `dropped_calls` stay."""
        if self.dropped_calls is not None:
            self._max_parts = min(self._max_parts, len(self.dropped_calls) + 2)  # drop the history in two halves

    def append(self, first: int, call: ModuleCall | None) -> None:
        """Record that the thread is inside `call` from sequence number `first` on."""
        numbers, calls = self._recent_calls
        if len(numbers) >= 2 * CALLS_REMEMBERED:  # other threads may be reading the existing lists
            if self.dropped_calls is not None and len(self.dropped_calls) <= self._max_parts:
                part = numbers[:CALLS_REMEMBERED], calls[:CALLS_REMEMBERED]
                self.dropped_calls.append(
                    part if len(self.dropped_calls) < self._max_parts else (numbers[:1], [None])
                )  # the new part and a gap
            numbers, calls = numbers[CALLS_REMEMBERED:], calls[CALLS_REMEMBERED:]
            self._recent_calls = numbers, calls
        calls.append(call)  # append the call first, so that every number has a call
        numbers.append(first)

    def inside(self, number: int) -> ModuleCall | None:
        """Return the module call in which the thread made the autograd node with this sequence number; None if unknown."""
        for numbers, calls in (self._recent_calls, *reversed(self.dropped_calls or ())):
            if position := bisect_right(numbers, number):
                return calls[position - 1]
        return None


# A module and the call around it. In a backward pass: the autograd node's sequence number, the call that started the
# pass, and the thread's current call.
ModuleCall = tuple[weakref.ref[torch.nn.Module], "ModuleCall | None"] | tuple[int, "ModuleCall | None", ForwardCalls]


@attrs.frozen
class ModulePath:
    """The position in a model at which an instruction was issued.

    Attributes:
        path: names from the outermost module to the innermost, such as `transformer.h.3.attn`; empty for the
            outermost.
        module: class of the innermost module.
        root: class of the outermost module.
        backward: True if the backward pass of the module issued the instruction.
    """

    path: str
    module: str
    root: str
    backward: bool = False

    def __str__(self) -> str:
        where = f"{self.path} ({self.module})" if self.path else self.module
        return f"the backward pass of {where}" if self.backward else where


def module_path(call: ModuleCall | None) -> ModulePath | None:
    """Return the path of a module call, with the modules' current names; None outside all modules, or if unknown."""
    modules = module_chain(call)
    if not modules:
        return None
    paths: list[str] = []
    for index, module in enumerate(modules):
        paths.append(_path_of(module, modules[:index], paths))
    return ModulePath(paths[-1], type(modules[-1]).__name__, type(modules[0]).__name__, is_backward(call))


def module_chain(call: ModuleCall | None) -> list[torch.nn.Module]:
    """Return the existing modules that enclose a call, from the outermost to the innermost."""
    return [module for module in map(_module_of, _outwards(call)) if module is not None][::-1]


def outermost_call(call: ModuleCall) -> ModuleCall | None:
    """Return the call of the outermost existing module that encloses `call`, or None if no such module exists."""
    outermost = None
    for link in _outwards(call):
        if _module_of(link) is not None:
            outermost = link
    return outermost


def is_backward(call: ModuleCall | None) -> bool:
    """Return True if a backward pass issued the instruction."""
    return any(isinstance(link[0], int) for link in _outwards(call))


def _outwards(call: ModuleCall | None) -> Iterator[ModuleCall]:
    """Yield the links of a chain of module calls, innermost first.

    A link of a backward pass is followed by the forward call that made its autograd node.
    """
    while call is not None:
        yield call
        call = _forward_call_of(call) if isinstance(call[0], int) else call[1]


def _module_of(link: ModuleCall) -> torch.nn.Module | None:
    return None if isinstance(link[0], int) else link[0]()


def _forward_call_of(link: Any) -> ModuleCall | None:
    """Return the module call that made the autograd node of `link`; None if unknown, or if several threads match."""
    number, _, thread_calls = link
    if number >= _NO_NODE:
        return None
    other_matches = [
        calls for calls in list(ForwardCalls.threads) if calls is not thread_calls and calls.inside(number) is not None
    ]
    return thread_calls.inside(number) if not other_matches else None


def _path_of(module: torch.nn.Module, outer: list[torch.nn.Module], paths: list[str]) -> str:
    """Return the path of `module` below the innermost of `outer` that contains it; its class name if none does."""
    if not outer:
        return ""
    for parent, path in zip(outer[::-1], paths[::-1], strict=True):
        for name, child in parent.named_modules(remove_duplicate=False):
            if child is module:
                return f"{path}.{name}" if path and name else path or name
    return f"{paths[-1]}.<{type(module).__name__}>".lstrip(".")
