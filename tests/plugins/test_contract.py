"""Objects that hooks return are checked against the base class of their kind, and the message names the member at fault."""

from __future__ import annotations

from typing import Any

import click
import pytest

from djinn_core.hookspecs.patterns import Pattern
from djinn_core.hookspecs.placement_policies import PlacementPolicy
from djinn_core.registry.contract import object_problem
from djinn_core.registry.kinds import KINDS, Kind

KIND = {kind.name: kind for kind in KINDS}


def make_member(base: type, **members: Any) -> Any:
    """Return an instance of a subclass of `base` with these members. Members that are None are left out."""
    return type("Made", (base,), {name: value for name, value in members.items() if value is not None})()


def pattern(**members: Any) -> Any:
    sound = {"name": "sound", "operations": frozenset({"mm"}), "match": lambda self, graph, candidates: []}
    return make_member(Pattern, **(sound | members))


def test_valid_plugin_object_passes() -> None:
    assert object_problem(pattern(), KIND["patterns"]) == ""
    assert object_problem(pattern(match=lambda self, graph, candidates, deep=False: []), KIND["patterns"]) == ""


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"operations": None}, "it lacks the attribute `operations` (frozenset[str])"),
        ({"operations": "mm"}, "its `operations` is 'mm', but must be a frozenset[str]"),
        ({"tolerates_growth": "no"}, "its `tolerates_growth` is 'no', but must be a bool"),
        ({"name": 5}, "its `name` is 5, but must be a str"),
        ({"name": ""}, "returned a Made with an empty `name`"),
    ],
)
def test_invalid_member_is_named(members: dict[str, Any], message: str) -> None:
    assert message in object_problem(pattern(**members), KIND["patterns"])


def test_plugin_attribute_may_have_union_type() -> None:
    def policy(**members: Any) -> Any:
        return make_member(PlacementPolicy, name="made", place=lambda self, context: None, **members)

    assert object_problem(policy(), KIND["placement_policies"]) == ""
    assert object_problem(policy(preference=3), KIND["placement_policies"]) == ""
    assert "its `preference` is 'high', but must be a int | None" in object_problem(
        policy(preference="high"), KIND["placement_policies"]
    )


def test_missing_method_is_named_at_construction() -> None:
    with pytest.raises(TypeError, match=r"abstract method '?match"):
        pattern(match=None)


def test_class_instead_of_instance_is_refused() -> None:
    assert object_problem(type(pattern()), KIND["patterns"]).endswith("must return instances: Made()")


def test_commands_must_be_click_commands() -> None:
    assert object_problem(click.Command("sound"), KIND["commands"]) == ""
    assert "derive its class from click.Command" in object_problem(pattern(), KIND["commands"])
    assert "with an empty `name`" in object_problem(click.Command(None), KIND["commands"])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_foreign_object_names_base_class(kind: Kind) -> None:
    package = "click" if kind.name == "commands" else "djinn.hooks"
    assert f"derive its class from {package}.{kind.base_name}" in object_problem(object(), kind)
