"""Prediction of fetches: if a program fetched results one after the other last time, they now come in one round trip.

    losses = [(x * i).sum() for i in range(100)]
    print([loss.item() for loss in losses])  # 100 round trips in the first run, one afterwards

Predicted elements are kept in the known contents of their storages. A wrong prediction costs bytes, never a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from djinn_client.interception.native.entries import RecordedProgram
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.entry import Entry
from djinn_client.interception.tensors.known_contents import KnownContents, known_contents
from djinn_core.ir.handles import storages_of
from djinn_core.system.lru import LruCache

VALUES_LIMIT: Final = 256  # maximum number of values in one predicted fetch
PROGRAMS: Final = 128  # maximum number of programs whose fetches are remembered
ENTRIES_LIMIT: Final = 2048  # number of remembered entries of a program, above which its oldest pieces are dropped


# Key of a program: the length of its last piece, and the identities of the first and last call of that piece.
_Key = tuple[int, int, int]


class _Follower(NamedTuple):
    """A value that the program fetched after its first fetch. The prediction holds only if the entry's call is `call`.

    `entry`: index of the entry that computes the value, from the program's end: -1 is the last entry. `position`: index
    of the value in the entry's `handles`.
    """

    entry: int
    position: int
    call: Any


class _KnownFetches(NamedTuple):
    """The fetches that followed a program last time.

    Attributes:
        followers: the fetched results, in order.
        calls: the calls whose identities are in the program's key. This field keeps them alive.
    """

    followers: tuple[_Follower, ...]
    calls: tuple[Any, Any]


class _Pieces(Sequence[Entry]):
    """Entries of consecutively sent pieces of a program. Each entry is created on access."""

    def __init__(self) -> None:
        self._parts: list[Sequence[Entry]] = []
        self._length = 0

    def add(self, part: Sequence[Entry]) -> None:
        """Append a piece. Drop the oldest pieces while the remaining pieces have at least `ENTRIES_LIMIT` entries."""
        self._parts.append(part)
        self._length += len(part)
        while self._length > ENTRIES_LIMIT and self._length - len(self._parts[0]) >= ENTRIES_LIMIT:
            self._length -= len(self._parts.pop(0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        offset = index + self._length if index < 0 else index
        for part in self._parts:
            if offset < len(part):
                return part[offset]
            offset -= len(part)
        raise IndexError(index)

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._parts)


class FetchPredictor:
    """Predict the fetches after a program from the fetches that followed it last time.

    Attributes:
        predicted_contents: for each handle of the last prediction, the object that will hold the elements.
    """

    def __init__(self) -> None:
        self._fetches: LruCache[_Key, _KnownFetches] = LruCache(PROGRAMS)
        self._last_entries: Sequence[Entry] = ()  # the last piece of the last program that was sent for a fetch
        self._entries: Sequence[Entry] = ()  # entries of that program
        self._pieces = _Pieces()  # entries that were sent since the last fetch
        self._predicted: tuple[_Follower, ...] = ()
        self.predicted_contents: dict[int, KnownContents] = {}
        self._fetched: list[int] = []  # handles that were fetched after the first
        self._first_handle = 0  # handle of the fetch for which the program was sent

    def note_piece(self, entries: Sequence[Entry]) -> None:
        """Record a piece of a program that was sent without a fetch."""
        self._pieces.add(entries)

    def begin(self, entries: Sequence[Entry], handle: int) -> tuple[int, ...]:
        """Record that a program is sent to fetch `handle`. Return the handles to fetch in the same round trip.

        `entries`: the last piece of the program.
        """
        if self._fetched or self.predicted_contents:
            self._learn()
            self._fetched = []
        self._first_handle = handle
        self._last_entries = entries
        self._entries = pieces = self._pieces
        pieces.add(entries)
        self._pieces = _Pieces()
        prediction = self._fetches.use(_key_of(entries)) if self._fetches else None
        if prediction is None:
            self._predicted, self.predicted_contents = (), {}
            return ()
        self._predicted = prediction.followers
        if any(-f.entry > len(pieces) or pieces[f.entry].call is not f.call for f in self._predicted):
            self._predicted = ()  # another program of the same length
        handles = [pieces[f.entry].handles[f.position] for f in self._predicted]
        storages = storages_of(handles)
        versions = zip(handles, storages, ops.sent_versions(storages), strict=True)
        self.predicted_contents = {
            handle: known_contents.at(storage, version) for handle, storage, version in versions if version >= 0
        }
        return tuple(self.predicted_contents)

    def drop_prediction(self) -> None:
        """Drop a prediction whose fetch failed."""
        self._predicted, self.predicted_contents = (), {}
        if self._last_entries:
            self._fetches.pop(_key_of(self._last_entries), None)

    def note_fetch(self, handle: int, unsent: int) -> None:
        """Record a fetch of a small value. `unsent`: number of unsent entries of the thread at the fetch."""
        if not unsent and handle != self._first_handle and len(self._fetched) < VALUES_LIMIT:
            self._fetched.append(handle)

    def _learn(self) -> None:
        handles = dict.fromkeys(self._fetched)
        if not self._last_entries or tuple(handles) == tuple(self.predicted_contents):
            return
        origins = {
            handle: _Follower(index, position, entry.call)
            for index, entry in enumerate(self._entries, -len(self._entries))
            for position, handle in enumerate(entry.handles)
            if handle in handles and position >= entry.call.operand_count
        }
        followers = tuple([origins[handle] for handle in handles if handle in origins])
        if followers == self._predicted:
            return
        last = self._last_entries
        self._fetches.store(_key_of(last), _KnownFetches(followers, (last[0].call, last[-1].call)))


def _key_of(last: Sequence[Entry]) -> _Key:
    if isinstance(last, RecordedProgram):  # creating an `Entry` for each of these would be slow
        return len(last), id(last.call(0)), id(last.call(-1))
    return len(last), id(last[0].call), id(last[-1].call)
