"""Template digests, and the LRU cache of templates at both ends."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from djinn_core.errors import ProtocolError
from djinn_core.system.lru import LruCache
from djinn_core.wire import limits
from djinn_core.wire.messages import Template

# Both ends evict in the same order at these limits, so an executor seldom lacks a template that the client assumes.
TEMPLATES_LIMIT = limits.TEMPLATES
INSTRUCTIONS_LIMIT = limits.TEMPLATE_INSTRUCTIONS

_encoder = msgspec.msgpack.Encoder()
V = TypeVar("V")


def digest_of(template: Template) -> bytes:
    """Return the BLAKE2b-128 digest of the encoded template.

    Raises:
        ProtocolError: the template is nested too deeply to be encoded.
    """
    try:
        return hashlib.blake2b(_encoder.encode(template), digest_size=16).digest()
    except RecursionError:
        raise ProtocolError("a template is nested too deeply") from None


class TemplateCache(Generic[V]):
    """LRU cache of values by template digest or source. The newest entry stays, even if it exceeds the limit."""

    def __init__(self, templates: int = TEMPLATES_LIMIT, instructions: int = INSTRUCTIONS_LIMIT) -> None:
        self._limit = instructions
        self._entries: LruCache[Hashable, tuple[V, int]] = LruCache(templates)
        self._instructions = 0
        self._newest: Hashable = None  # the last used key, which is in place already

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def instructions(self) -> int:
        """Number of instructions of all cached templates."""
        return self._instructions

    def get(self, key: Hashable) -> V | None:
        """Return the value for the template with this key, or None. Mark it as the most recently used."""
        entries = self._entries
        template = entries.get(key)
        if template is None:
            return None
        if key != self._newest:
            entries.move_to_end(key)
            self._newest = key
        return template[0]

    def replace(self, key: Hashable, value: V) -> V | None:
        """Replace the value of a cached template and return the former value. If the template is not cached, return None."""
        entries = self._entries
        template = entries.get(key)
        if template is None:
            return None
        entries[key] = value, template[1]
        if key != self._newest:
            entries.move_to_end(key)
            self._newest = key
        return template[0]

    def put(self, key: Hashable, value: V, instructions: int) -> None:
        """Cache `value` for a template of `instructions` instructions."""
        self._instructions += instructions - self._entries.pop(key, (None, 0))[1]
        self._newest = key
        for _, count in self._entries.store(key, (value, instructions)):
            self._instructions -= count
        while len(self._entries) > 1 and self._instructions > self._limit:
            self._instructions -= self._entries.pop(next(iter(self._entries)))[1]

    def drop(self, key: Hashable) -> None:
        """Evict the entry with this key, if there is one."""
        self._instructions -= self._entries.pop(key, (None, 0))[1]

    def entries(self) -> list[tuple[Hashable, V]]:
        """Return all keys and values, least recently used first."""
        return [(key, value) for key, (value, _) in self._entries.items()]

    def clear(self) -> None:
        """Evict all entries."""
        self._entries.clear()
        self._instructions = 0
