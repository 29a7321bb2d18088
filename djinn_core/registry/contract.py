"""Checks of a plugin's API version, and of the objects that its hooks return. Messages name the faulty member."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from djinn_core.hookspecs import API_VERSION
from djinn_core.registry.kinds import Kind

_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


def version_conflict(plugin: object) -> str:
    """Return the reason why a plugin's API version does not fit, as the end of a sentence, or an empty string."""
    version = getattr(plugin, "djinn_api_version", None)
    if version is None:
        return (
            "it does not say which plugin API it was written for. Add `djinn_api_version = "
            f'"{API_VERSION}"` next to its hooks, where {API_VERSION} is the version that this Djinn has'
        )
    if not isinstance(version, str) or not (match := _VERSION.fullmatch(version)):
        return f'its `djinn_api_version` is {version!r}, but must be text such as "{API_VERSION}"'
    plugin_version, own_version = (int(match[1]), int(match[2])), tuple(map(int, API_VERSION.split(".")))
    if plugin_version[0] == own_version[0] and plugin_version <= own_version:
        return ""
    advice = "Install a newer version of the plugin" if plugin_version < own_version else "Install a newer Djinn"
    return f"it was written for plugin API version {version}, and this Djinn has version {API_VERSION}. {advice}"


def object_problem(candidate: object, kind: Kind) -> str:
    """Return the reason why `candidate` is not an object of `kind`, as the end of a sentence, or an empty string."""
    base = kind.base
    name = getattr(candidate, "name", "")
    label = f"{type(candidate).__name__} {name!r}" if name else f"an instance of {type(candidate).__name__}"
    if isinstance(candidate, type):
        return f"returned the class {candidate.__name__}, but must return instances: {candidate.__name__}()"
    if not isinstance(candidate, base):
        package = base.__module__.partition(".")[0]
        module = "djinn.hooks" if package == kind.package else package
        return f"returned {label}, which is no {base.__name__}: derive its class from {module}.{base.__name__}"
    if faults := [*_faults(candidate, kind)]:
        return f"returned {label}, which is no {base.__name__}: {'; '.join(faults)}"
    if not name:
        return f"returned a {type(candidate).__name__} with an empty `name`"
    return ""


def _faults(candidate: object, kind: Kind) -> Iterator[str]:
    """Yield faults in the annotated attributes of a plugin object. Methods need no check: they are inherited or overridden."""
    if kind.base.__module__.partition(".")[0] != kind.package:  # a class of another library
        return
    for member, annotation in get_type_hints(kind.base).items():
        if not hasattr(candidate, member):
            yield f"it lacks the attribute `{member}` ({_annotation_text(annotation)})"
        elif not isinstance(value := getattr(candidate, member), _classes(annotation)):
            yield f"its `{member}` is {value!r}, but must be a {_annotation_text(annotation)}"


def _classes(annotation: Any) -> tuple[type, ...]:
    """Return the classes of the values that an annotation allows, ignoring item types."""
    parts = get_args(annotation) if get_origin(annotation) in {Union, UnionType} else (annotation,)
    return tuple(get_origin(part) or part for part in parts)


def _annotation_text(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) and get_origin(annotation) is None else str(annotation)
