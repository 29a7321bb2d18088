"""Check the API version of a plugin, and the objects that its hooks return. A message names the member at fault."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

from djinn_core.hookspecs import API_VERSION
from djinn_core.registry.kinds import Kind

_VERSION = re.compile(r"(\d+)\.(\d+)")


def version_conflict(plugin: object) -> str:
    """Reason why a plugin's API version does not fit, as the end of a sentence, or an empty string."""
    version = getattr(plugin, "djinn_api_version", None)
    if version is None:
        return (
            "it does not say which plugin API it was written for. Add `djinn_api_version = "
            f'"{API_VERSION}"` beside its hooks, where {API_VERSION} is the version that this Djinn has'
        )
    if not isinstance(version, str) or not (found := _VERSION.fullmatch(version)):
        return f'its `djinn_api_version` is {version!r}, but must be text such as "{API_VERSION}"'
    written, here = (int(found[1]), int(found[2])), tuple(map(int, API_VERSION.split(".")))
    if written[0] == here[0] and written <= here:
        return ""
    advice = "Install a newer version of the plugin" if written < here else "Install a newer Djinn"
    return f"it was written for plugin API version {version}, and this Djinn has version {API_VERSION}. {advice}"


def complaint(candidate: object, kind: Kind) -> str:
    """Reason why `candidate` is no object of `kind`, as the end of a sentence, or an empty string."""
    expected = kind.protocol.__name__
    name = getattr(candidate, "name", "")
    shown = f"{type(candidate).__name__} {name!r}" if name else f"an instance of {type(candidate).__name__}"
    if isinstance(candidate, type):
        return f"returned the class {candidate.__name__}, but must return instances: {candidate.__name__}()"
    faults = [*_faults(candidate, kind.protocol), *_optional_faults(candidate, kind.optional_members)]
    if faults:
        return f"returned {shown}, which is no {expected}: {'; '.join(faults)}"
    if not name:
        return f"returned a {type(candidate).__name__} with an empty `name`"
    return ""


def _faults(candidate: object, expected: type) -> Iterator[str]:
    if Protocol in expected.__mro__:
        yield from _attribute_faults(candidate, expected)
        yield from _method_faults(candidate, expected)
    elif not isinstance(candidate, expected):
        package = expected.__module__.partition(".")[0]
        yield f"it is no instance of {'djinn.hooks' if package == 'djinn_core' else package}.{expected.__name__}"
    elif expected.__module__.startswith("djinn_core."):
        yield from _attribute_faults(candidate, expected)


def _optional_faults(candidate: object, members: Mapping[str, Any]) -> Iterator[str]:
    for member, expected in members.items():
        if not isinstance(value := getattr(candidate, member, None), (expected, type(None))):
            yield f"its `{member}` is {value!r}, but must be a {_spelled(expected)}"


def _attribute_faults(candidate: object, protocol: type) -> Iterator[str]:
    for member, annotation in _attributes(protocol).items():
        expected = _classes(annotation)
        if not hasattr(candidate, member):
            yield f"it lacks the attribute `{member}` ({_spelled(annotation)})"
        elif not isinstance(value := getattr(candidate, member), expected):
            yield f"its `{member}` is {value!r}, but must be a {_spelled(annotation)}"


def _method_faults(candidate: object, protocol: type) -> Iterator[str]:
    for member, expected in _methods(protocol).items():
        if not callable(method := getattr(candidate, member, None)):
            yield f"it lacks the method `{member}{expected}`"
        elif inspect.iscoroutinefunction(method):
            yield f"its method `{member}` is asynchronous, but is called without await"
        elif not _accepts(method, len(expected.parameters) - 1):
            yield f"its method `{member}{inspect.signature(method)}` must accept `{member}{expected}`"


def _classes(annotation: Any) -> tuple[type, ...]:
    """Classes of the values that an annotation allows, without what it says of their items."""
    parts = get_args(annotation) if get_origin(annotation) in {Union, UnionType} else (annotation,)
    return tuple(get_origin(part) or part for part in parts)


def _attributes(protocol: type) -> Mapping[str, Any]:
    """Types of the attributes of a Protocol."""
    return get_type_hints(protocol)


def _methods(protocol: type) -> Mapping[str, inspect.Signature]:
    """Signatures of the methods of a Protocol."""
    functions = inspect.getmembers(protocol, inspect.isfunction)
    return {name: inspect.signature(function) for name, function in functions if not name.startswith("_")}


def _accepts(method: Callable[..., Any], count: int) -> bool:
    try:
        signature = inspect.signature(method)
    except ValueError:  # a method written in C has no signature to look at
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _spelled(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) and get_origin(annotation) is None else str(annotation)
