"""Flags of `djinn serve`, declared where the field of a configuration class is that they set."""

from __future__ import annotations

import attrs

FLAG = "flag"  # the key in the metadata of a field


@attrs.frozen
class Flag:
    """A flag that sets the field whose metadata it is in.

    Attributes:
        name: as it is typed, such as `--store-gib`.
        help: its text in `--help`.
        least, above, most: bounds of a number.
        default: what `djinn serve` takes without the flag, where that is not the default of the field.
        gib: True if the flag is in GiB; the field is in bytes.
        file: True for a path that is no directory.
        exists: True for a path at which something must be.
    """

    name: str
    help: str
    least: int | None = None
    above: int | None = None
    most: int | None = None
    default: float | None = None
    gib: bool = False
    file: bool = False
    exists: bool = False

    @property
    def metadata(self) -> dict[str, Flag]:
        """Metadata of the field."""
        return {FLAG: self}
