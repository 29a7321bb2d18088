"""Classes of scalars: plans are looked up by them, so that programs with scalars of the same classes share plans."""

from __future__ import annotations

from typing import Final

from djinn_core.ir.program import Slot

_REMEMBERED: Final = 65536


class ScalarClasses:
    """The class of each scalar: a small whole number is one of its own; of others (sizes, rates) the sign counts.

    Equal numbers have the same class, whichever type they are of: what is an int for one call is one for all calls of its kind.
    """

    def __init__(self, exact_below: int) -> None:
        """Tell whole numbers apart whose absolute value is less than `exact_below`."""
        self._exact_below = exact_below
        self._known: dict[Slot, Slot | str] = {}

    def of(self, slots: tuple[Slot, ...]) -> tuple[Slot | str, ...]:
        """The class of each scalar."""
        known = self._known
        found = list(map(known.get, slots))
        if None not in found:
            return tuple(found)  # type: ignore[arg-type] # no None is left
        if len(known) > _REMEMBERED:
            known.clear()
        known.update((slot, self._class_of(slot)) for slot in slots if slot not in known)
        return tuple([known[slot] if slot in known else self._class_of(slot) for slot in slots])

    def _class_of(self, slot: Slot) -> Slot | str:
        if slot != slot:  # noqa: PLR0124 - nan
            return "nan"
        if abs(slot) < self._exact_below and slot == int(slot):
            return int(slot)
        return "+" if slot > 0 else "-"
