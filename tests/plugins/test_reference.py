"""The events in the suite agree with the code. The docstrings of base and value classes describe every member."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import djinn
import djinn_client.hookspecs
import djinn_core.hookspecs
import djinn_server.hookspecs
from djinn.testing.observers import EVENTS
from djinn_core.registry.kinds import KINDS, Kind

ROOT = Path(__file__).parents[2]


def classes(kind: Kind) -> Iterator[type]:
    """Return the base and value classes in the module of a kind's hook."""
    for item in vars(kind.specification).values():
        if inspect.isclass(item) and item.__module__ == kind.specification.__name__:
            yield item


def values() -> Iterator[type]:
    """Return the value classes of `djinn.planning`, which belong to no single kind."""
    face = importlib.import_module("djinn.planning")
    for name in face.__all__:
        item = getattr(face, name)
        if inspect.isclass(item) and item.__module__.startswith("djinn_core.ir.") and attrs.has(item):
            yield item


def undescribed(item: type) -> set[str]:
    """Return the members that have no description."""
    text = inspect.getdoc(item) or ""
    types = (
        {field.name: field.type for field in attrs.fields(item)} if attrs.has(item) else inspect.get_annotations(item)
    )
    face = {*djinn.hooks.__all__, *djinn.planning.__all__}
    missing = {
        name
        for name, wanted in types.items()
        if name != "name" and not name.startswith("_")
        if str(wanted) not in face and not re.search(rf"\b{name}\b", text)
    }
    for name, member in vars(item).items():
        callable_ = inspect.isfunction(member) or isinstance(member, property)
        if callable_ and not name.startswith("_") and not inspect.getdoc(getattr(item, name)):
            missing.add(name)
    return missing


def test_every_hook_module_is_a_kind() -> None:
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for package in (djinn_core.hookspecs, djinn_client.hookspecs, djinn_server.hookspecs)
        for found in pkgutil.iter_modules(package.__path__)
    ]
    declared = {name for module in modules for name in vars(module) if name.startswith("djinn_register_")}
    assert declared == {kind.hook for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind_classes_describe_their_members(kind: Kind) -> None:
    assert {item.__name__: missing for item in classes(kind) if (missing := undescribed(item))} == {}


@pytest.mark.parametrize("item", list(values()), ids=lambda item: item.__name__)
def test_value_classes_describe_their_members(item: type) -> None:
    assert undescribed(item) == set()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_hook_docstrings_state_call_and_errors(kind: Kind) -> None:
    said = " ".join((inspect.getdoc(_hook(kind)) or "").split())
    (processes,) = re.findall(r"Called once in (?:the|each) ([\w, ]+) process", said)
    assert all(process in processes for process in kind.processes), f"{kind.hook}: {processes}"
    assert re.search(r"exception|raises", said), "what does raising do?"


def _hook(kind: Kind) -> Any:
    return getattr(kind.specification, kind.hook)


def test_kind_classes_are_exported() -> None:
    face = importlib.import_module("djinn.hooks")
    for kind in KINDS:
        for item in classes(kind):
            assert getattr(face, item.__name__) is item


def test_observed_events_match_code() -> None:
    """Compare events of clients that occur in the suite with those in the code."""
    told: dict[str, set[str]] = {}
    paths = (path for folder in ("djinn_client/runtime", "plugins") for path in (ROOT / folder).rglob("*.py"))
    sources = (path.read_text(encoding="utf-8") for path in paths if "tests" not in path.parts)
    for source in filter(re.compile(r"(observers|events)\.emit\b").search, sources):
        for call in ast.walk(ast.parse(source)):
            if (
                isinstance(call, ast.Call)
                and re.search(r"(observers|_events)\.emit$", ast.unparse(call.func))
                and call.args
            ):
                named = {word.arg for word in call.keywords if word.arg is not None}
                told.setdefault(ast.literal_eval(call.args[0]), set()).update(named)
    told["connected"] |= {"server", "kinds", "fallbacks"}  # which are a dictionary of the call
    suite = {name: set(facts) for name, facts in EVENTS["client"].items()}
    assert told == suite
