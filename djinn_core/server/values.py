"""The values of one session on an executor: tensors by handle, and what took the place of those that failed."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch

from djinn_core.ir.values import storage_of
from djinn_core.wire.messages import Failure


@attrs.frozen
class Poison:
    """Stands where a value would be that could not be computed; whatever uses it becomes poison, too."""

    failure: Failure


def no_such_value(sequence: int, handle: int) -> Failure:
    """What submission `sequence` gets for a value that is not there."""
    reason = (
        f"this session has no value {handle}: its tensor was made in a session that has ended. Make or load it again"
    )
    return Failure(sequence, -1, "", "SessionLost", reason)


# Beside tensors, what ops return that is none: numbers, random generators, events.
Stored = torch.Tensor | Poison | torch.Generator | torch.Event | bool | int | float | complex | None


def _address(value: Stored) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


class ValueTable:
    """Values by handle."""

    def __init__(self) -> None:
        self._values: dict[int, Stored] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, handle: int) -> bool:
        return handle in self._values

    def __getitem__(self, handle: int) -> Stored:
        """The value.

        Raises:
            KeyError: this session has no such value.
        """
        return self._values[handle]

    def __setitem__(self, handle: int, value: Stored) -> None:
        self._values[handle] = value

    def free(self, handles: Iterable[int]) -> None:
        """Forget values; handles that are not there are ignored."""
        for handle in handles:
            self._values.pop(handle, None)

    def poison_storage(self, handle: int, address: int, failure: Failure) -> None:
        """Poison every value that shares memory with `handle`, whose memory is at `address`: a write failed half way.

        The address finds those that came to share it by other ways than being views of one tensor.
        """
        storage = storage_of(handle)
        for other, value in list(self._values.items()):
            if storage_of(other) == storage or (address and _address(value) == address):
                self._values[other] = Poison(failure)

    def tensors(self) -> list[torch.Tensor]:
        """The values that are tensors."""
        return [v for v in list(self._values.values()) if isinstance(v, torch.Tensor)]

    def nbytes(self) -> int:
        """Bytes of the distinct storages that are held."""
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors()}
        return sum(sizes.values())

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
