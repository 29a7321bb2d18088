"""Path of the module that issued an instruction, such as `transformer.h.3.attn`.

A call of a module is one link of a chain, from the innermost call outwards. Links are plain tuples, because one is made
for every call of a module; names are looked up only on request.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import attrs
import torch

CALLS_REMEMBERED = (
    16384  # entries and exits of modules, in each thread, that backward passes can surely be traced back to
)
BACKWARD: Final = "backward"  # what a thread is in while the autograd engine runs, as the modules around it are
_NO_NODE = 1 << 63  # from here on sequence numbers belong to no op: nodes that accumulate gradients have the largest


class ForwardCalls:
    """Module calls of a thread, each with the autograd sequence number from which on the thread was inside it.

    One thread appends, and its numbers only grow; any thread may look.

    Attributes:
        kept: what would have been forgotten, while a timeline is recorded, which looks at its end; None: nothing is kept.
    """

    threads: ClassVar[weakref.WeakSet[ForwardCalls]] = weakref.WeakSet()
    __slots__ = ("__weakref__", "_most_kept", "_remembered", "kept")

    def __init__(self) -> None:
        self._remembered: tuple[list[int], list[ModuleCall | None]] = [], []
        self.kept: list[tuple[list[int], list[ModuleCall | None]]] | None = None
        self._most_kept = sys.maxsize  # parts
        self.threads.add(self)

    def keep(self) -> None:
        """Keep what would be forgotten, from now on."""
        self.kept, self._most_kept = [], sys.maxsize

    def keep_no_more(self) -> None:
        """Keep, of what would be forgotten, only what there is now."""
        if self.kept is not None:
            self._most_kept = min(self._most_kept, len(self.kept) + 2)  # what is remembered is forgotten in two parts

    def append(self, first: int, call: ModuleCall | None) -> None:
        """From number `first` on the thread is inside `call`."""
        numbers, calls = self._remembered
        if len(numbers) >= 2 * CALLS_REMEMBERED:  # others may be looking into the lists that there are
            if self.kept is not None and len(self.kept) <= self._most_kept:
                part = numbers[:CALLS_REMEMBERED], calls[:CALLS_REMEMBERED]
                self.kept.append(part if len(self.kept) < self._most_kept else (numbers[:1], [None]))  # and a gap
            numbers, calls = numbers[CALLS_REMEMBERED:], calls[CALLS_REMEMBERED:]
            self._remembered = numbers, calls
        calls.append(call)  # first, so that there is a call for each number
        numbers.append(first)

    def inside(self, number: int) -> ModuleCall | None:
        """Module call in which the thread made the autograd node with this sequence number; None if that is not known."""
        for numbers, calls in (self._remembered, *reversed(self.kept or ())):
            if found := bisect_right(numbers, number):
                return calls[found - 1]
        return None


# A module and the call that it was called in; or, in a backward pass, the sequence number of the autograd node, the call
# that the pass was begun in, and what this thread was inside when.
ModuleCall = tuple[weakref.ref[torch.nn.Module], "ModuleCall | None"] | tuple[int, "ModuleCall | None", ForwardCalls]


@attrs.frozen
class ModulePath:
    """Place in a model at which an instruction was issued.

    Attributes:
        path: names from the outermost module to the innermost, such as `transformer.h.3.attn`; empty for the outermost.
        module: class of the innermost. root: class of the outermost.
        backward: whether the backward pass of the module issued it.
    """

    path: str
    module: str
    root: str
    backward: bool = False

    def __str__(self) -> str:
        where = f"{self.path} ({self.module})" if self.path else self.module
        return f"the backward pass of {where}" if self.backward else where


def module_path(call: ModuleCall | None) -> ModulePath | None:
    """The path of a call, as the modules are named now; None outside all modules, or where that is not known."""
    modules = module_chain(call)
    if not modules:
        return None
    paths: list[str] = []
    for index, module in enumerate(modules):
        paths.append(_path_of(module, modules[:index], paths))
    return ModulePath(paths[-1], type(modules[-1]).__name__, type(modules[0]).__name__, is_backward(call))


def module_chain(call: ModuleCall | None) -> list[torch.nn.Module]:
    """The modules that a call is inside of and that are still there, from the outermost to the innermost."""
    return [module for module in map(_alive, _outwards(call)) if module is not None][::-1]


def outermost_call(call: ModuleCall) -> ModuleCall | None:
    """The call of the outermost module that a call is inside of and that is still there."""
    found = None
    for link in _outwards(call):
        if _alive(link) is not None:
            found = link
    return found


def is_backward(call: ModuleCall | None) -> bool:
    """True if a backward pass issued the instruction."""
    return any(isinstance(link[0], int) for link in _outwards(call))


def _outwards(call: ModuleCall | None) -> Iterator[ModuleCall]:
    """The links of a chain; what a backward pass recomputes goes on with what its node was made in."""
    while call is not None:
        yield call
        call = _forward_of(call) if isinstance(call[0], int) else call[1]


def _alive(link: ModuleCall) -> torch.nn.Module | None:
    return None if isinstance(link[0], int) else link[0]()


def _forward_of(link: Any) -> ModuleCall | None:
    """The call that made the autograd node; numbers are each thread's own, so they tell only where one thread fits."""
    number, _, mine = link
    if number >= _NO_NODE:
        return None
    others = [calls for calls in list(ForwardCalls.threads) if calls is not mine and calls.inside(number) is not None]
    return mine.inside(number) if not others else None


def _path_of(module: torch.nn.Module, outer: list[torch.nn.Module], paths: list[str]) -> str:
    """The path of `module`: that of the innermost of `outer` that has it, and its name there; its class where none has."""
    if not outer:
        return ""
    for parent, path in zip(outer[::-1], paths[::-1], strict=True):
        for name, child in parent.named_modules(remove_duplicate=False):
            if child is module:
                return f"{path}.{name}" if path and name else path or name
    return f"{paths[-1]}.<{type(module).__name__}>".lstrip(".")
