"""The reference of hooks is complete: every hook, every member and argument of what it registers, every field."""

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

from djinn.testing.observers import EVENTS
from djinn_core import hookspecs
from djinn_core.hookspecs import API_VERSION
from djinn_core.ir.plan import Rewrite
from djinn_core.ir.short_repr import ShortRepr
from djinn_core.registry.kinds import KINDS, Kind

TEXT = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")


def sections() -> dict[str, str]:
    """Text by heading of the second level."""
    parts = re.split(r"^## (.+)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def classes(kind: Kind) -> Iterator[type]:
    """Names that a plugin author of a kind meets: Protocols and values in the module of its hook."""
    for item in vars(kind.specification).values():
        if inspect.isclass(item) and item.__module__.startswith("djinn_core.") and item is not ShortRepr:
            yield item


def members(item: type) -> Iterator[str]:
    """Fields of a value; attributes of a Protocol, and its methods with their arguments."""
    if attrs.has(item):
        yield from (field.name for field in attrs.fields(item) if not field.name.startswith("_"))
        return
    yield from inspect.get_annotations(item)
    for name, member in vars(item).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            arguments = [argument for argument in inspect.signature(member).parameters if argument != "self"]
            yield f"{name}({', '.join(arguments)})"
        elif isinstance(member, property):
            yield name


def described(text: str) -> set[str]:
    """First words of the items of the lists in a section."""
    heads = re.findall(r"^- ((?:`[^`]+`,? ?)+)", text, flags=re.MULTILINE)
    return {name for head in heads for name in re.findall(r"`([^`]+)`", head)}


def test_every_hook_has_a_section_and_no_section_has_no_hook() -> None:
    modules = [
        importlib.import_module(f"{hookspecs.__name__}.{found.name}")
        for found in pkgutil.iter_modules(hookspecs.__path__)
    ]
    declared = {name for module in modules for name in vars(module) if name.startswith("djinn_register_")}
    assert declared == {kind.hook for kind in KINDS}
    assert declared == {heading for heading in sections() if heading.startswith("djinn_")}
    table = {line.split("`")[1]: line.split("`")[3] for line in TEXT.splitlines() if line.startswith("| `djinn_")}
    assert table == {kind.hook: kind.name for kind in KINDS}


def test_the_reference_says_in_which_processes_hooks_are_called() -> None:
    rows = (line.split(" | ") for line in TEXT.splitlines() if line.startswith("| `djinn_"))
    told = {cells[0].strip("| `"): cells[2] for cells in rows}
    assert told == {kind.hook: ", ".join(kind.processes).replace("command", "the command `djinn`") for kind in KINDS}
    for kind in KINDS:
        said = " ".join((inspect.getdoc(_hook(kind)) or "").split())
        (processes,) = re.findall(r"Called once in (?:the|each) ([\w, ]+) process", said)
        assert all(process in processes for process in kind.processes), f"{kind.hook}: {processes}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_member_is_described(kind: Kind) -> None:
    found = sections()
    for item in (*classes(kind), Rewrite):
        own = item.__module__ == kind.specification.__name__ or item.__module__.startswith("djinn_core.wire")
        text = found[kind.hook] if own else found[item.__name__]
        missing = set(members(item)) - described(text)
        assert not missing, f"docs/hooks.md does not describe {sorted(missing)} of {item.__name__}"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_hook_says_when_it_is_called_and_what_raising_does(kind: Kind) -> None:
    for text in (inspect.getdoc(getattr(kind.specification, kind.hook)) or "", sections()[kind.hook]):
        flat = " ".join(text.split())
        assert re.search(r"Called once in (the|each) [\w, ]+ process", flat), "when and in which process?"
        assert re.search(r"exception disables|raises", flat), "what does raising do?"
    assert f"Since API version {API_VERSION}." in " ".join((inspect.getdoc(_hook(kind)) or "").split())


def _hook(kind: Kind) -> Any:
    return getattr(kind.specification, kind.hook)


def test_everything_is_where_the_reference_says_it_is() -> None:
    face = importlib.import_module("djinn.hooks")
    for kind in KINDS:
        for item in classes(kind):
            assert getattr(face, item.__name__) is item


def test_events_and_their_facts_are_those_that_are_told() -> None:
    """Of the client's observers: in the reference, in the suite and in the code."""
    root = Path(__file__).parents[2] / "djinn_client"
    told: dict[str, set[str]] = {}
    sources = (path.read_text(encoding="utf-8") for path in (root / "runtime").rglob("*.py"))
    for source in filter(re.compile(r"observers\.tell\(").search, sources):
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and re.search(r"observers\.tell$", ast.unparse(call.func)) and call.args:
                named = {word.arg for word in call.keywords if word.arg is not None}
                told.setdefault(ast.literal_eval(call.args[0]), set()).update(named)
    told["connected"] |= {"server", "kinds", "fallbacks"}  # which are a dictionary of the call
    suite = {name: set(facts) for name, facts in EVENTS.items() if name != "one_of_a_later_version"}
    assert told == suite
    rows = re.findall(
        r"^\| (`[^|]+) \| [^|]+ \| ([^|]+) \|$", sections()["djinn_register_observers"], flags=re.MULTILINE
    )
    listed = {
        name: set(re.findall(r"`(\w+)`", facts)) for names, facts in rows for name in re.findall(r"`(\w+)`", names)
    }
    assert set(listed) == set(told)
    assert {name: facts - listed[name] for name, facts in told.items() if facts - listed[name]} == {}
