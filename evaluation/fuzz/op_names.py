"""Names of disallowed ops, in every spelling, over a real connection.

    python -m evaluation op-names [--tries 100000] [--seed 0]

Each name is the op of a separate template. Bugs are a submission that does not fail, a session that ends, and an
allowed op that fails afterwards. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from djinn_client.runtime.connecting.handshake import Server, reach_executor
from djinn_core.hookspecs.transports import Connection, Frame
from djinn_core.ir.form import Form, Operand
from djinn_core.ir.handles import make_handle
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.messages import Attached, Completed, InitialBindings, Submit, Template, decode, encode
from djinn_core.wire.templates import digest_of
from djinn_core.wire.upload_messages import UploadPart
from evaluation.served import served

SECONDS = 120.0
GIVEN = make_handle(1, 1)
MODULE = """
import torch


@torch.library.custom_op("fuzz_names::allowed", mutates_args=())
def allowed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("fuzz_names::allowed_too", mutates_args=())
def allowed_too(x: torch.Tensor) -> torch.Tensor:
    return x * 3


torch.library.define("fuzz_names::kept_back", "(Tensor x) -> Tensor")
torch.library.impl("fuzz_names::kept_back", "CPU", lambda x: x * 4)
"""
PARTS = (
    *"fuzz_names kept_back allowed aten djinn prim prims torch torch.ops builtins os sys __class__ __dict__ __globals__ __init__".split(),
    *"_ops add.Tensor relu system save load_library default out :: . : / %s {0} .. * ~".split(),
    *(" ", "", "\n", "\x00", "\u200b", "\u0430ten", "\u202e", "\U0001f600", "allowed\u0301", "\uff1a\uff1a"),
)  # fmt: skip


def hostile_names(allowed: frozenset[str], count: int, seed: int) -> Iterator[str]:
    """Yield names neither in `allowed` nor of `aten` or `djinn`: combinations of parts, and misspelt allowed names."""
    draw, sources = random.Random(seed), sorted(allowed)
    while count:
        name = _put_together(draw) if draw.random() < 0.5 else _respelt(draw, draw.choice(sources))
        if name not in allowed and not name.startswith(("aten::", "djinn::")):
            yield name
            count -= 1


def _put_together(draw: random.Random) -> str:
    return "".join(draw.choices(PARTS, k=draw.randrange(7)))


def _respelt(draw: random.Random, name: str) -> str:
    at = draw.randrange(len(name) + 1)
    kind = draw.randrange(9)
    if kind == 0:
        return draw.choice((name.upper(), name.title(), name.swapcase(), name[::-1]))
    if kind == 1:
        return name + draw.choice(
            (".default", ".out", ".Tensor", ".", "..default", "._op", ".__class__", ".default.default")
        )
    if kind == 2:
        return draw.choice(("torch.ops.", "torch.", "ops::", "::", " ")) + name.replace(
            "::", draw.choice(("::", ".", ":", ":::", "__"))
        )
    if kind == 3:
        return name[:at] + draw.choice(PARTS) + name[at:]
    if kind == 4:
        return name[:at]
    if kind == 5:
        return name[at:]
    if kind == 6:
        return name * draw.randrange(2, 200)
    if kind == 7:
        return name[:at] + chr(draw.choice((0x200D, 0xFEFF, 0x0301, 0xE0001, 0x3A, 0x5F, 0x2E))) + name[at:]
    return name.replace(draw.choice(name), chr(draw.randrange(0x370, 0x600)), 1)


class Talk:
    """A session with one tensor, whose messages this process sends one by one."""

    def __init__(self, connection: Connection, attached: Attached) -> None:
        self._connection, self._sequence = connection, 0
        self.allowed = frozenset(operator_name.name for operator_name in attached.custom_operators)
        connection.send(Frame(encode(UploadPart(GIVEN, "float32", (2, 2), (2, 1), 16)), [bytes(16)]))

    def run(self, name: str) -> Completed:
        """Run an op of this name on the tensor, and return the reply."""
        self._sequence += 1
        template = Template((Form(name, (Operand(),), (), ("new",), False),), (0,), (0, 1), (0,), (1,))
        first = InitialBindings((), pack_handles([GIVEN]))
        output = pack_handles([make_handle(1 + self._sequence, 1)])
        submit = Submit(
            self._sequence, (), output, digest_of(template), output, first=first, template=template, synchronize=True
        )
        self._connection.send(Frame(encode(submit)))
        reply = decode(self._connection.receive(SECONDS).head)
        assert isinstance(reply, Completed), reply
        return reply


@contextlib.contextmanager
def talking(url: str, token: str) -> Iterator[Talk]:
    """Yield a session on the server at `url`."""
    transports = load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports"}).transports
    connection = reach_executor(Server((url,), token, transports, SECONDS), "")
    try:
        yield Talk(connection.connection, connection.attached)
    finally:
        connection.connection.close()


def try_names(talk: Talk, count: int, seed: int) -> Counter[str]:
    """Return the number of errors of each kind for `count` hostile names. The key `allowed` counts names without an error."""
    results: Counter[str] = Counter()
    for name in hostile_names(talk.allowed, count, seed):
        failures = talk.run(name).failures
        results[failures[0].kind if failures else "allowed"] += 1
    return results


@contextlib.contextmanager
def _serving() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fuzz_names_ops.py").write_text(MODULE)
        paths = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
        options = ("--store-gib", "0", "--lease-seconds", "0", "--operators", "module:fuzz_names_ops")
        with served(*options, folder=folder, environment={"PYTHONPATH": paths}) as server:
            yield server.tcp, server.token


def main() -> int:
    """Try the names. Exit with 1 if one was allowed, or an allowed op failed afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with _serving() as (url, token), talking(url, token) as talk:
        result = try_names(talk, options.tries, options.seed)
        sound = all(not talk.run(name).failures for name in talk.allowed)
        allowed_names = sorted(talk.allowed)
    sys.stdout.write(
        json.dumps({"tries": options.tries, "errors": dict(result), "offered": allowed_names, "sound": sound}) + "\n"
    )
    return int(bool(result["allowed"]) or not sound)


if __name__ == "__main__":
    sys.exit(main())
