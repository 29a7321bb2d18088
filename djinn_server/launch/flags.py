"""Declare flags of `djinn serve` in the fields of the configuration classes that they set."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import attrs

FLAG: Final = "flag"  # key of a `Flag` in the metadata of its field
_T = TypeVar("_T")


@attrs.frozen
class Flag:
    """A command-line flag of `djinn serve`, in the metadata of the field that it sets.

    Attributes:
        name: option name, such as `--store-gib`.
        help: text in `--help`.
        least, most: inclusive bounds of a number; None: no bound.
        above: exclusive lower bound instead of `least`; None: no such bound.
        serve_default: default of `djinn serve` instead of the field's default; None: the field's default.
        gib: True if the flag is in GiB and the field in bytes.
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
    """Return an attrs field with a default and a `Flag`. `properties`: further attributes of the flag."""
    field: _T = attrs.field(default=default, metadata={FLAG: Flag(name, help, **properties)})
    return field
