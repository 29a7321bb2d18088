"""Declare flags of `djinn serve` beside the fields of the configuration classes that they set."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import attrs

FLAG: Final = "flag"  # key of a `Flag` in the metadata of its field
_T = TypeVar("_T")


@attrs.frozen
class Flag:
    """A command-line flag, in the metadata of the field that it sets.

    Attributes:
        name: option name, such as `--store-gib`.
        help: text in `--help`.
        least, most: inclusive bounds of a number.
        above: exclusive lower bound, instead of `least`.
        serve_default: default of `djinn serve`, if it differs from the default of the field.
        gib: True if the flag is in GiB; the field is in bytes.
        file: True if the value is the path of a file.
        exists: True if the path must exist.
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
    """Return an attrs field with a default and a flag of `djinn serve`.

    `properties`: further attributes of the `Flag`.
    """
    field: _T = attrs.field(default=default, metadata={FLAG: Flag(name, help, **properties)})
    return field
