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
        name: as it is typed, such as `--store-gib`.
        help: its text in `--help`.
        least, above, most: bounds of a number.
        serve_default: value with `djinn serve` where the flag is not given, if that is not the default of the field.
        gib: True if the flag is in GiB; the field is in bytes.
        file: True for a path that is no directory.
        exists: True for a path at which something must be.
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
    """A field of a configuration class with this default, which a flag sets. `properties`: the other attributes of the `Flag`."""
    field: _T = attrs.field(default=default, metadata={FLAG: Flag(name, help, **properties)})
    return field
