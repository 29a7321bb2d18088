"""Small mutations of arbitrary bytes, and of MessagePack or JSON that stays well-formed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

INTERESTING = (
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**63 - 1,
    2**64 - 1,
)
WORDS = (
    "",
    "float32",
    "object",
    "aten::relu",
    "os::system",
    "aten::from_file",
    "x" * 300,
    "\ud7ff",
    "planes+zstd",
    "new",
    "none",
)


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return `data` with one to four changes."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        _change(out, draw)
    return bytes(out)


def _change(out: bytearray, draw: random.Random) -> None:
    # The beginning, with lengths and types, is changed as often as all the rest.
    end = min(len(out), 40) if draw.random() < 0.5 else len(out)
    at, way = draw.randrange(end + 1), draw.randrange(7)
    if way == 0 and at < len(out):
        out[at] ^= 1 << draw.randrange(8)
    elif way == 1 and at < len(out):
        out[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    elif way == 2:
        del out[at : at + draw.choice((1, 1, 2, 8, 64))]
    elif way == 3:
        out[at:at] = draw.randbytes(draw.choice((1, 2, 4, 8)))
    elif way == 4:
        size = draw.choice((1, 2, 4, 8))
        number = draw.choice(INTERESTING) % 256**size
        out[at : at + size] = number.to_bytes(size, draw.choice(("little", "big")))
    elif way == 5:
        out[at:at] = out[at : at + draw.choice((1, 8, 32, 200))]
    else:
        del out[at:]


def changed_tree(tree: Any, draw: random.Random, times: int = 1) -> Any:
    """Return a tree of lists, dicts and scalars with some nodes changed; changed parts are copied."""
    for _ in range(times):
        places = list(_places(tree))
        if not places:
            return _other(tree, draw)
        tree = _replaced(tree, draw.choice(places), lambda node: _other(node, draw))
    return tree


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = enumerate(tree) if isinstance(tree, list | tuple) else tree.items() if isinstance(tree, dict) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _replaced(tree: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(tree)
    key, *rest = path
    copy = list(tree) if isinstance(tree, list | tuple) else dict(tree)
    copy[key] = _replaced(copy[key], tuple(rest), change)
    return copy


def _other(node: Any, draw: random.Random) -> Any:
    if draw.random() < 0.1:  # another type
        return draw.choice((None, True, 0, -1, 1.5, "", b"", [], {}, [[[]]], draw.choice(INTERESTING)))
    if isinstance(node, bool):
        return not node
    if isinstance(node, int):
        near = (node + 1, node - 1, node * 2, -node, node ^ 1 << draw.randrange(40))
        result = draw.choice((*near, draw.choice(INTERESTING)))
        return result if -(2**63) <= result < 2**64 else 0
    if isinstance(node, float):
        return draw.choice((0.0, -0.0, float("nan"), float("inf"), 1e308, -node))
    if isinstance(node, str):
        return draw.choice((draw.choice(WORDS), node[:-1], node + "_", node.upper()))
    if isinstance(node, bytes):
        return changed_bytes(node, draw)
    if isinstance(node, list | tuple):
        return _other_list(list(node), draw)
    return {} if isinstance(node, dict) else draw.choice((0, "", []))


def _other_list(items: list[Any], draw: random.Random) -> list[Any]:
    way = draw.randrange(6)
    if way == 0 and items:
        del items[draw.randrange(len(items))]
    elif way == 1 and items:
        items.insert(draw.randrange(len(items)), draw.choice(items))
    elif way == 2 and len(items) > 1:
        a, b = draw.randrange(len(items)), draw.randrange(len(items))
        items[a], items[b] = items[b], items[a]
    elif way == 3:
        items = items[: draw.randrange(len(items) + 1)]
    elif way == 4:
        items = (items * draw.choice((2, 3, 20)))[:5000]
    else:
        items = [items] * draw.choice((1, 1, 1, 2))
    return items


def nested(depth: int) -> bytes:
    """Return MessagePack of arrays that are nested `depth` deep."""
    return b"\x91" * depth + b"\xc0"


def mutated(data: bytes, draw: random.Random, codec: Any) -> bytes:
    """Return `data` mutated as bytes or as its decoded value. `codec`: `msgspec.msgpack`, `msgspec.json` or None."""
    if codec is not None and draw.random() < 0.6:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError, ValueError, RecursionError, TypeError):
            return codec.encode(changed_tree(codec.decode(data), draw, draw.choice((1, 1, 2, 4))))
    return changed_bytes(data, draw)
