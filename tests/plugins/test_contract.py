"""Results of hooks are checked against their Protocols, and the message names the member at fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast, runtime_checkable

import click
import pytest

from djinn_core.hookspecs.api_names import ApiName
from djinn_core.hookspecs.placement_policies import PlacementPolicy
from djinn_core.registry.contract import complaint
from djinn_core.registry.kinds import KINDS, Kind

KIND = {kind.name: kind for kind in KINDS}


@runtime_checkable
class Finds(Protocol):
    """What the objects of an imagined kind must satisfy."""

    name: str
    operations: frozenset[str]

    def match(self, graph: object, candidates: Sequence[object]) -> Iterable[object]:
        """Find something."""


FINDS = cast("Kind", SimpleNamespace(protocol=Finds, optional_members={"preference": int}))


def pattern(**members: Any) -> object:
    sound = {"name": "sound", "operations": frozenset({"mm"}), "match": lambda self, graph, candidates: []}
    return type("Made", (), {name: value for name, value in (sound | members).items() if value is not None})()


def test_a_sound_object_passes() -> None:
    assert complaint(pattern(), FINDS) == ""
    assert complaint(pattern(match=lambda self, *nodes: []), FINDS) == ""
    assert complaint(pattern(match=lambda self, graph, candidates, deep=False: []), FINDS) == ""


async def _later(self: object, graph: object, candidates: object) -> list[object]:
    return []


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"operations": None}, "it lacks the attribute `operations` (frozenset[str])"),
        ({"match": None}, "it lacks the method `match(self, graph"),
        ({"match": 3}, "it lacks the method `match(self, graph"),
        ({"operations": "mm"}, "its `operations` is 'mm', but must be a frozenset[str]"),
        ({"name": 5}, "its `name` is 5, but must be a str"),
        ({"name": ""}, "returned a Made with an empty `name`"),
        ({"match": lambda self, graph: []}, "its method `match(graph)` must accept `match(self, graph"),
        ({"match": _later}, "its method `match` is asynchronous"),
    ],
)
def test_the_member_at_fault_is_named(members: dict[str, Any], message: str) -> None:
    assert message in complaint(pattern(**members), FINDS)


def test_a_class_is_no_instance() -> None:
    assert complaint(type(pattern()), FINDS).endswith("must return instances: Made()")


def test_commands_are_those_of_click() -> None:
    assert complaint(click.Command("sound"), KIND["commands"]) == ""
    assert "it is no instance of click.Command" in complaint(pattern(), KIND["commands"])
    assert "with an empty `name`" in complaint(click.Command(None), KIND["commands"])


def test_api_names_are_those_of_djinn() -> None:
    assert complaint(ApiName("sound", "package.module"), KIND["api_names"]) == ""
    assert "it is no instance of djinn.hooks.ApiName" in complaint(pattern(), KIND["api_names"])
    assert "with an empty `name`" in complaint(ApiName("", "package.module"), KIND["api_names"])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_object_without_anything_lacks_every_member(kind: Any) -> None:
    problem = complaint(object(), kind)
    if Protocol not in kind.protocol.__mro__:
        package = "djinn.hooks" if kind.protocol.__module__.startswith("djinn_core.") else "click"
        assert f"it is no instance of {package}.{kind.protocol.__name__}" in problem
        return
    members = [name for name in (*kind.protocol.__annotations__, *vars(kind.protocol)) if not name.startswith("_")]
    assert members
    for member in members:
        assert f"`{member}" in problem


def test_optional_members_have_their_types() -> None:
    assert complaint(pattern(preference=3), FINDS) == ""
    assert "its `preference` is 'high', but must be a int" in complaint(pattern(preference="high"), FINDS)


def test_attributes_of_a_base_class_have_their_types() -> None:
    def policy(**members: Any) -> object:
        return type("Made", (PlacementPolicy,), {"name": "made", "place": lambda self, context: None, **members})()

    assert complaint(policy(), KIND["placement_policies"]) == ""
    assert complaint(policy(preference=3), KIND["placement_policies"]) == ""
    assert "its `preference` is 'high', but must be a int | None" in complaint(
        policy(preference="high"), KIND["placement_policies"]
    )
