"""Flags of `djinn serve`, declared with the fields of configuration classes that they set."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import attrs

FLAG: Final = "flag"  # key of a `Flag` in the metadata of its field
_T = TypeVar("_T")


@attrs.frozen
class Flag:
    """A flag that sets the field whose metadata it is in.

    Attributes:
        name: option name, such as `--store-gib`. help: its text in `--help`.
        least, above, most: bounds of a number.
        serve_default: default with `djinn serve`, if it differs from the default of the field.
        gib: True if the flag is in GiB; the field is in bytes.
        file: True for a path of a file. exists: True for a path that must exist.
    """

    name: str
    help: str
    least: int | None = None
    above: int | None = None
    most: int | None = None
    serve_default: float | None = None
    gib: bool = False
    file: bool = False
    exists: bool = False


def flagged(default: _T, name: str, help: str, **properties: Any) -> _T:  # noqa: A002 - as in `Flag`
    """Declare a field of a configuration class with a default and a flag.

    `properties`: the other attributes of the `Flag`.
    """
    field: _T = attrs.field(default=default, metadata={FLAG: Flag(name, help, **properties)})
    return field
