"""Paths of the modules that issued a program's instructions, for all of them at once, in linear time."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from djinn_core.ir.module_path import ModuleCall, module_chain, module_path


@attrs.define
class ModuleNames:
    """Where in a model each instruction was issued.

    Attributes:
        paths: by instruction, such as `model.layers.0.mlp`; those issued outside all modules are not listed.
        classes: names of the modules' classes, in the order in which they came.
    """

    paths: dict[int, str] = attrs.field(factory=dict)
    classes: tuple[str, ...] = ()


def module_names(calls: Sequence[ModuleCall | None]) -> ModuleNames:
    """The names for the calls that a program was recorded in, as the modules are named now."""
    found: dict[int, str] = {}
    classes: dict[str, None] = {}
    known: dict[int, str] = {}
    tables: dict[int, dict[int, str]] = {}
    for index, call in enumerate(calls):
        if call is None:
            continue
        path = known.get(id(call))
        if path is None:
            path = known[id(call)] = _path(call, tables, classes)
        found[index] = path
    return ModuleNames(found, tuple(classes))


def _path(call: ModuleCall, tables: dict[int, dict[int, str]], classes: dict[str, None]) -> str:
    modules = module_chain(call)
    if not modules:
        return ""
    classes.update(dict.fromkeys(type(m).__name__ for m in modules))
    root, last = modules[0], modules[-1]
    table = tables.get(id(root))
    if table is None:
        table = tables[id(root)] = _table(root)
    path = table.get(id(last))
    if path is not None:
        return path
    found = module_path(call)  # a module that is no part of the outermost one
    return found.path if found is not None else ""


def _table(root: torch.nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in root.named_modules()}
