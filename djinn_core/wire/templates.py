"""Digests of templates, and how many of them either side keeps."""

from __future__ import annotations

import hashlib

import msgspec

from djinn_core.wire.messages import Template

# Both sides forget the least recently used template beyond this many, in the same order, so a client seldom has to ask.
TEMPLATES_LIMIT = 1024

_encoder = msgspec.msgpack.Encoder()


def digest_of(template: Template) -> bytes:
    """BLAKE2b-128 of the encoded template."""
    return hashlib.blake2b(_encoder.encode(template), digest_size=16).digest()
