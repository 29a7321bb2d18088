"""Cache of facts about forms. A form is an op call without its operands and numbers.

A new template mostly consists of forms of earlier templates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from djinn_core.ir.form import Form

T = TypeVar("T")
MAX_FORMS: Final = 4096  # entries of each cache
MAX_FORM_BYTES: Final = 512  # encoded size of a form that is cached: clients choose the contents of forms
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Form)


def cached_by_form(compute: Callable[[Form], T]) -> Callable[[Form], T]:
    """Return `compute` with an LRU cache for short forms."""

    @functools.lru_cache(maxsize=MAX_FORMS)
    def cached(content: bytes) -> T:
        return compute(_decoder.decode(content))

    @functools.wraps(compute)
    def lookup(form: Form) -> T:
        content = _encoder.encode(form)
        return cached(content) if len(content) <= MAX_FORM_BYTES else compute(form)

    return lookup
