"""Modules of a thread over time, from the recorded times at which the thread entered and left modules."""

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
    """Names of modules below their outermost module. The names are read once, while the module is alive."""

    _tables: dict[_Reference, dict[_Reference, str]] = attrs.field(factory=dict)

    def record_root(self, root: torch.nn.Module) -> None:
        """Read the names of all modules below an outermost module, at its first call."""
        reference = weakref.ref(root)
        if reference not in self._tables:
            table = {weakref.ref(child): name for name, child in root.named_modules()}
            self._tables[reference] = {**table, reference: type(root).__name__}

    def name(self, root: _Reference, reference: _Reference) -> str:
        """Return a module's name below its outermost module, its class if it has no name, or "" if it no longer exists."""
        table = self._tables.get(root)
        if table is not None and (name := table.get(reference)) is not None:
            return name
        module = reference()
        return type(module).__name__ if module is not None else ""

    def of_node(self, number: int, calls: ForwardCalls) -> tuple[tuple[str, ...], _Reference | None]:
        """Return the modules that created an autograd node: names, outermost first, and the outermost module or None."""
        modules = module_chain((number, None, calls))
        if not modules:
            return (), None
        self.record_root(modules[0])
        root = weakref.ref(modules[0])
        return tuple([self.name(root, weakref.ref(module)) for module in modules]), root

    def of_call(self, call: ModuleCall | None) -> tuple[str, ...]:
        """Return the names of the modules that enclose a call. `BACKWARD` precedes the modules of a backward pass."""
        inner: list[_Reference] = []
        while call is not None and not isinstance(call[0], int):
            inner.append(call[0])
            call = call[1]
        enclosing, root = self.of_node(call[0], call[2]) if call is not None and len(call) == 3 else ((), None)
        names = filter(None, (self.name(root or inner[-1], number) for number in reversed(inner)))
        return (*((BACKWARD,) if call is not None else ()), *enclosing, *names)


def with_nodes(moments: Moments, nodes: Sequence[tuple[float, int]]) -> Moments:
    """Return `moments` merged with `nodes`: the autograd nodes that C++ recorded in backward passes."""
    if not nodes:
        return moments
    node_moments, inside = list[Any](), list[bool]()
    merged = chain(zip(moments[::2], moments[1::2], strict=True), nodes)
    for moment, key in sorted(merged, key=lambda one: one[0]):
        if isinstance(key, int):
            if not inside or not inside[-1] or node_moments[-1] == key:
                continue
        elif key is not None:
            inside.append(isinstance(key, str))
        elif inside:
            inside.pop()
        node_moments += moment, key
    return node_moments


def module_changes(
    moments: Moments, calls: ForwardCalls, names: ModulePaths
) -> Iterator[tuple[float, Keys, tuple[str, ...]]]:
    """Yield the modules of a thread at each change: the time, and the keys and names of modules, outermost first.

    An exit without an entry, because the entry was before the first moment, is ignored. Modules entered in a backward
    pass are listed below `BACKWARD` and below the modules whose forward pass created the current autograd node.
    """
    open_: list[tuple[Keys, tuple[str, ...], _Reference | None]] = [
        ((), (), None)
    ]  # with the enclosing modules; the outermost
    at_node = [False]  # whether the innermost entry is an autograd node, which the next node replaces
    for place in range(0, len(moments), 2):
        moment, key = moments[place : place + 2]
        if (key is None or isinstance(key, int)) and at_node[-1]:
            open_.pop()
            at_node.pop()
        if key is None:
            if len(open_) == 1:
                continue
            open_.pop()
            at_node.pop()
        else:
            keys, enclosing, root = open_[-1]
            if isinstance(key, int):
                inner, root = names.of_node(key, calls)  # names in recomputed checkpoints are below the same root
                open_.append(((*keys, *inner), (*enclosing, *inner), root))
            elif isinstance(key, str):
                open_.append(((*keys, place), (*enclosing, key), None))
            else:
                root = root or key
                name = names.name(root, key)
                open_.append(((*keys, place), (*enclosing, name), root) if name else (keys, enclosing, root))
            at_node.append(isinstance(key, int))
        yield moment, *open_[-1][:2]
