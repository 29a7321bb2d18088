"""Validators and converters for fields of plugin results.

The constructor runs them, so that a traceback names the plugin's line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, Final

import attrs
from attrs.validators import deep_iterable, deep_mapping, instance_of

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], Any]
IS_MAPPING: Final[Validator] = instance_of(Mapping)
IS_SET: Final[Validator] = instance_of(AbstractSet)


def tuple_of(kind: type) -> Validator:
    """Return a validator for a tuple or list with elements of `kind`."""
    return deep_iterable(instance_of(kind), instance_of((tuple, list)))


def as_tuple(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return `numbers` as a tuple."""
    return tuple(numbers)


def mapping_of(keys: type, values: type = object) -> Validator:
    """Return a validator for a mapping from `keys` to `values`."""
    return deep_mapping(instance_of(keys), instance_of(values), IS_MAPPING)


def read_only(mapping: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a read-only view of `mapping`. Plugins must not change mappings of the planner."""
    return mapping if isinstance(mapping, MappingProxyType) else MappingProxyType(mapping)
