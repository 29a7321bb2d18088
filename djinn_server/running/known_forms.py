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
FORMS_LIMIT: Final = 4096  # forms of which a fact is remembered
LONGEST: Final = 512  # bytes of such a form on the wire: clients name them
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Form)


def kept_by_form(find: Callable[[Form], T]) -> Callable[[Form], T]:
    """Decorate a function of a form with a cache for short forms."""

    @functools.lru_cache(maxsize=FORMS_LIMIT)
    def kept(content: bytes) -> T:
        return find(_decoder.decode(content))

    @functools.wraps(find)
    def found(form: Form) -> T:
        content = _encoder.encode(form)
        return kept(content) if len(content) <= LONGEST else find(form)

    return found
