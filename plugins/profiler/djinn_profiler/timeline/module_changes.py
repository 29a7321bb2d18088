"""Modules of a thread over time, from the times that its recorder noted. Names are looked up once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import attrs
import torch

from djinn_core.ir.module_path import BACKWARD, ForwardCalls, ModuleCall, module_chain

Moments = Sequence[Any]  # as in `ThreadRecord.moments`
Keys = tuple[object, ...]  # distinguish two calls of a module
_Reference = weakref.ref[torch.nn.Module]


@attrs.define
class ModulePaths:
    """Names of modules below their outermost module. Each outermost module is walked once, while it is alive."""

    _tables: dict[_Reference, dict[_Reference, str]] = attrs.field(factory=dict)

    def met(self, root: torch.nn.Module) -> None:
        """Record a call of an outermost module."""
        reference = weakref.ref(root)
        if reference not in self._tables:
            table = {weakref.ref(one): name for name, one in root.named_modules()}
            self._tables[reference] = {**table, reference: type(root).__name__}

    def name(self, root: _Reference, reference: _Reference) -> str:
        """Return a module's name below its outermost module.

        If the module has no name there, return its class. If it no longer exists, return an empty string.
        """
        table = self._tables.get(root)
        if table is not None and (name := table.get(reference)) is not None:
            return name
        module = reference()
        return type(module).__name__ if module is not None else ""

    def of_node(self, number: int, calls: ForwardCalls) -> tuple[tuple[str, ...], _Reference | None]:
        """Return the names of the modules that created an autograd node, outermost first, and the outermost module or None."""
        modules = module_chain((number, None, calls))
        if not modules:
            return (), None
        self.met(modules[0])
        root = weakref.ref(modules[0])
        return tuple([self.name(root, weakref.ref(module)) for module in modules]), root

    def of_call(self, call: ModuleCall | None) -> tuple[str, ...]:
        """Return the names of the modules that enclose a call. `BACKWARD` precedes the modules of a backward pass."""
        inner: list[_Reference] = []
        while call is not None and not isinstance(call[0], int):
            inner.append(call[0])
            call = call[1]
        around, root = self.of_node(call[0], call[2]) if call is not None and len(call) == 3 else ((), None)
        names = filter(None, (self.name(root or inner[-1], one) for one in reversed(inner)))
        return (*((BACKWARD,) if call is not None else ()), *around, *names)


def with_nodes(moments: Moments, nodes: Sequence[tuple[float, int]]) -> Moments:
    """Return the moments with added autograd nodes, which C++ noted in backward passes outside of modules."""
    if not nodes:
        return moments
    found, inside = list[Any](), list[bool]()
    both = chain(zip(moments[::2], moments[1::2], strict=True), nodes)
    for moment, what in sorted(both, key=lambda one: one[0]):
        if isinstance(what, int):
            if not inside or not inside[-1] or found[-1] == what:
                continue
        elif what is not None:
            inside.append(isinstance(what, str))
        elif inside:
            inside.pop()
        found += moment, what
    return found


def module_changes(
    moments: Moments, calls: ForwardCalls, names: ModulePaths
) -> Iterator[tuple[float, Keys, tuple[str, ...]]]:
    """Yield the modules of a thread over time: at each change a key and name per module, from the outermost inwards.

    An exit without an entry, because the entry was before the first moment, is ignored. Modules entered in a backward
    pass lie in `BACKWARD` and in the modules of the pass's current autograd node.
    """
    open_: list[tuple[Keys, tuple[str, ...], _Reference | None]] = [
        ((), (), None)
    ]  # with the enclosing modules; the outermost
    at_node = [False]  # whether the innermost entry is an autograd node, which the next node replaces
    for place in range(0, len(moments), 2):
        moment, what = moments[place : place + 2]
        if (what is None or isinstance(what, int)) and at_node[-1]:
            open_.pop()
            at_node.pop()
        if what is None:
            if len(open_) == 1:
                continue
            open_.pop()
            at_node.pop()
        else:
            keys, around, root = open_[-1]
            if isinstance(what, int):
                inner, root = names.of_node(what, calls)  # names in recomputed checkpoints are below the same root
                open_.append(((*keys, *inner), (*around, *inner), root))
            elif isinstance(what, str):
                open_.append(((*keys, place), (*around, what), None))
            else:
                root = root or what
                name = names.name(root, what)
                open_.append(((*keys, place), (*around, name), root) if name else (keys, around, root))
            at_node.append(isinstance(what, int))
        yield moment, *open_[-1][:2]
