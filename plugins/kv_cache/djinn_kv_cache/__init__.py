"""Recognise KV caches: keys and values that attention reads and that outlive the program."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_kv_cache.pattern import KeyValueCache

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """Return the pattern `kv_cache`."""
    return [KeyValueCache()]
