"""Paths of the modules that issued a program's instructions, in linear time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs
import torch

from djinn_core.ir.module_path import ModuleCall, module_chain, module_path, outermost_call


@attrs.define
class ModuleNames:
    """Module paths and classes of a program's instructions.

    Attributes:
        paths: by instruction, such as `model.layers.0.mlp`; instructions outside all modules are missing.
        classes: class names of the modules, in order of first call.
        runs: by instruction, the number of the outermost module call that issued it.
        called: class of each called module, by number of the outermost call and by path.
    """

    paths: dict[int, str] = attrs.field(factory=dict)
    classes: tuple[str, ...] = ()
    runs: dict[int, int] = attrs.field(factory=dict)
    called: dict[tuple[int, str], str] = attrs.field(factory=dict)

    @property
    def key(self) -> Hashable:
        """Return a hashable cache key."""
        return tuple(self.paths.items()), self.classes, tuple(self.runs.items()), tuple(self.called.items())


def module_names(calls: Sequence[ModuleCall | None]) -> ModuleNames:
    """Return the module names of a program's instructions, given the module call of each.

    Modules have their current names.
    """
    namer = _CallNamer()
    for index, call in enumerate(calls):
        if call is not None:
            namer.add(index, call)
    names = namer.names
    return attrs.evolve(names, classes=tuple(dict.fromkeys(namer.classes)))


@attrs.define
class _CallNamer:
    names: ModuleNames = attrs.field(factory=ModuleNames)
    classes: dict[str, None] = attrs.field(factory=dict)
    _name_by_call: dict[int, tuple[str, int]] = attrs.field(factory=dict)
    _runs: dict[int, int] = attrs.field(factory=dict)
    _tables: dict[int, dict[int, str]] = attrs.field(factory=dict)

    def add(self, index: int, call: ModuleCall) -> None:
        name = self._name_by_call.get(id(call))
        if name is None:
            name = self._name_by_call[id(call)] = self._name(call)
        self.names.paths[index] = name[0]
        if name[1] >= 0:
            self.names.runs[index] = name[1]

    def _name(self, call: ModuleCall) -> tuple[str, int]:
        """Return the path of a call, and the number of its outermost module call."""
        modules = module_chain(call)
        if not modules:
            return "", -1
        run = self._runs.setdefault(id(outermost_call(call)), len(self._runs))
        self.classes.update(dict.fromkeys(type(m).__name__ for m in modules))
        table = self._table(modules[0])
        for module in modules:
            if id(module) in table:
                self.names.called.setdefault((run, table[id(module)]), type(module).__name__)
        path = table.get(id(modules[-1]))
        if path is None:  # a module outside of the outermost one
            detached = module_path(call)
            path = detached.path if detached is not None else ""
            self.names.called.setdefault((run, path), type(modules[-1]).__name__)
        return path, run

    def _table(self, root: torch.nn.Module) -> dict[int, str]:
        table = self._tables.get(id(root))
        if table is None:
            table = self._tables[id(root)] = {id(module): name for name, module in root.named_modules()}
        return table
