"""Delta encoding of a template's bindings (handles and slots): usual bindings take one or two bytes.

A handle consists of a storage number and a view number. Handles of one message are close to each other, and consecutive
loop steps bind almost equal values. So the encoding stores differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import sub

from djinn_core.errors import ProtocolError
from djinn_core.ir.handles import VIEW_BITS, VIEW_MASK
from djinn_core.wire import limits

Slot = int | float
# Two numbers per handle: storage number minus that of the previous handle, and view bits minus the storage number.
Handles = tuple[int, ...]
# Three numbers per change: position minus the previous position, then the handle, as above.
InputChanges = tuple[int, ...]
# Per new slot value: its positions, each minus the previous one.
SlotChanges = tuple[tuple[Slot, tuple[int, ...]], ...]

_HANDLE_LIMIT = 1 << 63


def pack_handles(handles: Iterable[int]) -> Handles:
    """Encode handles as differences."""
    differences: list[int] = []
    previous = 0
    for handle in handles:
        storage = handle >> VIEW_BITS
        differences += (storage - previous, (handle - storage) & VIEW_MASK)
        previous = storage
    return tuple(differences)


def unpack_handles(packed: Handles) -> list[int]:
    """Decode the handles that `pack_handles` encoded.

    Raises:
        ProtocolError: the list is malformed.
    """
    match packed:
        case ():
            return []
        case (storage, view) if 0 <= view <= VIEW_MASK:  # the usual case: a single handle
            handle = storage << VIEW_BITS | (storage + view) & VIEW_MASK
            if 0 <= handle < _HANDLE_LIMIT:
                return [handle]
    if len(packed) > 2 * limits.HANDLES:
        raise ProtocolError(f"a list has {len(packed) // 2:,} handles; the limit is {limits.HANDLES:,}")
    if len(packed) % 2:
        raise ProtocolError("a list of handles is truncated")
    views = packed[1::2]
    handles = [_handle(s, v) for s, v in zip(accumulate(packed[::2]), views, strict=True)]
    if not (min(handles) >= 0 and max(handles) < _HANDLE_LIMIT and min(views) >= 0 and max(views) <= VIEW_MASK):
        raise ProtocolError("a handle is out of range")
    return handles


def _handle(storage: int, view: int) -> int:
    return storage << VIEW_BITS | (storage + view) & VIEW_MASK


def pack_inputs(positions: Sequence[int], handles: Sequence[int]) -> InputChanges:
    """Encode the new handles at ascending positions as differences."""
    differences: list[int] = []
    position = storage = 0
    for new_position, handle in zip(positions, handles, strict=True):
        previous_storage, storage = storage, handle >> VIEW_BITS
        differences += (new_position - position, storage - previous_storage, (handle - storage) & VIEW_MASK)
        position = new_position
    return tuple(differences)


def apply_input_changes(before: list[int], changes: InputChanges) -> None:
    """Apply the changes that `pack_inputs` encoded to `before`, in place.

    Raises:
        ProtocolError: the changes do not match `before`, or are malformed.
    """
    if len(changes) % 3:
        raise ProtocolError("a list of bindings is truncated")
    positions = accumulate(changes[::3])
    storages = accumulate(changes[1::3])
    for position, storage, view in zip(positions, storages, changes[2::3], strict=True):
        if not 0 <= position < len(before):
            raise ProtocolError(f"a submission changes input {position}, but its template has {len(before)} inputs")
        handle = _handle(storage, view)
        if not (0 <= view <= VIEW_MASK and 0 <= handle < _HANDLE_LIMIT):
            raise ProtocolError("a handle is out of range")
        before[position] = handle


def pack_slots(positions: Sequence[int], slots: Sequence[Slot]) -> SlotChanges:
    """Encode the new slots at ascending positions, grouped by value.

    An int differs from a float of the same value. 0.0 differs from -0.0.
    """
    groups: dict[tuple[type, Slot, bool], list[int]] = {}
    for position, new in zip(positions, slots, strict=True):
        groups.setdefault((type(new), new, new == 0 and str(new).startswith("-")), []).append(position)
    return tuple([(-0.0 if key[2] else key[1], tuple(map(sub, at, [0, *at]))) for key, at in groups.items()])


def apply_slot_changes(slots: list[Slot], changes: SlotChanges) -> None:
    """Apply the changes that `pack_slots` encoded to `slots`, in place.

    Raises:
        ProtocolError: a position is out of range.
    """
    for slot, distances in changes:
        for position in accumulate(distances):
            if not 0 <= position < len(slots):
                raise ProtocolError(f"a submission changes scalar {position} of only {len(slots)}")
            slots[position] = slot
