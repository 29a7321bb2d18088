"""Ops with hostile sizes, counts, nestings, numbers and texts, beside a tensor that has to stay as it is.

    python tests/fuzz/hostile_ops.py [--ops 10000] [--seed 0]

An op may raise what it likes. A bug is: a session that is lost, or would have to be recovered, or a tensor that is not
what it was. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import djinn
from djinn.testing import open_session
from djinn_core.errors import RemoteError, SessionLost

REMOTE = "remote_accelerator:0"
# Nothing that a machine might just have memory for: an executor that the system kills is no finding.
SIZES = (0, 1, 2, 3, -1, -7, 1 << 44, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 70, -(1 << 63), -(1 << 70))
COUNTS = (0, 1, 2, 63, 64, 65, 70, 300, 1000, 5000, 100_000)
NUMBERS = (*SIZES, 0.5, -0.0, 1e308, float("nan"), float("inf"), 1j, complex("nan"), True, None, "text", 10**40)
TEXTS = ("", "floor", "x" * 300, "é" * 70_000, "\ud800", "\0", "a,b->c" * 9000)
CHECKED_EVERY = 50
Make = Callable[[random.Random, torch.Tensor], Any]


def sizes(rng: random.Random) -> Any:
    """A shape: short, long, nested, of the wrong type."""
    kind = rng.randrange(6)
    if kind == 0:
        return [1] * rng.choice(COUNTS[:-1])
    if kind == 1:
        return [rng.choice(SIZES) for _ in range(rng.choice((1, 2, 3, 64, 65, 70)))]
    if kind == 2:
        return nested(rng.choice((1, 2, 20, 70)))
    if kind == 3:
        return rng.choice(NUMBERS)
    return [rng.choice(SIZES[:4]) for _ in range(rng.randrange(5))]


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def tensors(rng: random.Random, one: torch.Tensor) -> list[torch.Tensor]:
    """A list of tensors, which may be long."""
    return [one] * rng.choice(COUNTS)


FACTORIES: tuple[Callable[..., Any], ...] = (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn)
MAKES: tuple[Make, ...] = (
    lambda rng, _: rng.choice(FACTORIES)(sizes(rng), device=REMOTE),
    lambda rng, _: torch.full(sizes(rng), rng.choice(NUMBERS), device=REMOTE),
    lambda rng, _: torch.empty([1] * rng.choice(COUNTS[:8])).to(REMOTE),
    lambda rng, _: torch.tensor(nested(rng.choice((1, 64, 65, 200))), device=REMOTE),
    lambda rng, one: one[:1].view(sizes(rng)),
    lambda rng, one: one.reshape(sizes(rng)),
    lambda rng, one: one[:1].expand(sizes(rng)),
    lambda rng, one: one.permute(sizes(rng)),
    lambda rng, one: one.repeat(sizes(rng)),
    lambda rng, one: one.flip(sizes(rng)),
    lambda rng, one: one.as_strided(sizes(rng), sizes(rng), rng.choice(SIZES)),
    lambda rng, one: one.narrow(rng.choice(SIZES), rng.choice(SIZES), rng.choice(SIZES)),
    lambda rng, one: one.unsqueeze(rng.choice(SIZES)),
    lambda rng, one: one.select(rng.choice(SIZES), rng.choice(SIZES)),
    lambda rng, one: one.unfold(rng.choice(SIZES), rng.choice(SIZES), rng.choice(SIZES)),
    lambda rng, one: one[(None,) * rng.choice(COUNTS[:8])],
    lambda rng, one: one[rng.choice(NUMBERS)],
    lambda rng, one: one.split([0] * rng.choice((*COUNTS[:9], 100_000)) + [4]),
    lambda rng, one: one.roll([1] * rng.choice(COUNTS), [0] * rng.choice(COUNTS)),
    lambda rng, one: torch.cat(tensors(rng, one), rng.choice(SIZES)),
    lambda rng, one: torch.stack(tensors(rng, one)),
    lambda rng, one: torch.cat([*nested(3), one]),
    lambda rng, one: torch._foreach_add(tensors(rng, one), rng.choice(NUMBERS)),
    lambda rng, one: torch._foreach_mul_(tensors(rng, one.clone()), rng.choice(NUMBERS)),
    lambda rng, one: torch._foreach_add(tensors(rng, one), tensors(rng, one)),
    lambda rng, one: one + rng.choice(NUMBERS),
    lambda rng, one: one.long() * rng.choice(NUMBERS),
    lambda rng, one: one.clone().fill_(rng.choice(NUMBERS)),
    lambda rng, one: one.clamp(rng.choice(NUMBERS), rng.choice(NUMBERS)),
    lambda rng, one: one.pow(rng.choice(NUMBERS)),
    lambda rng, one: torch.div(one, 2, rounding_mode=rng.choice(TEXTS)),
    lambda rng, one: torch.einsum(rng.choice(TEXTS), one),
    lambda rng, one: one.norm(rng.choice((*NUMBERS, *TEXTS))),
    lambda rng, one: one.sum(sizes(rng)),
    lambda rng, one: one.clone().index_fill_(0, torch.tensor([99], device=REMOTE), 1.0),
    lambda rng, one: one.index_select(0, torch.tensor([rng.choice((-9, 99))], device=REMOTE)),
    lambda rng, one: one.clone().add_(torch.ones(3, device=REMOTE)),
    lambda rng, one: one.clone().resize_(sizes(rng)),
    lambda rng, one: torch.Generator(REMOTE).manual_seed(rng.choice(SIZES)),
    lambda rng, one: one.cumsum(rng.choice(SIZES)),
    lambda rng, one: torch.broadcast_to(one, sizes(rng)),
)


def run(ops: int, seed: int) -> dict[str, Any]:
    """So many ops; how many were done, and what was raised.

    Raises:
        AssertionError: a tensor is not what it was.
        SessionLost: the session is.
    """
    rng = random.Random(seed)
    witness = torch.arange(4.0).to(REMOTE)
    session = open_session()
    raised: Counter[str] = Counter()
    for number in range(ops):
        make = rng.choice(MAKES)
        try:
            made = make(rng, witness)
            if rng.random() < 0.2 and isinstance(made, torch.Tensor) and made.numel() < 100:
                made.cpu()
        except SessionLost as error:
            raise SessionLost(f"op {number} of seed {seed}, number {MAKES.index(make)} of `MAKES`: {error}") from error
        except Exception as error:  # whatever it says of the op
            raised[type(error).__name__] += 1
        if number % CHECKED_EVERY == 0 or number == ops - 1:
            assert witness.cpu().tolist() == [0.0, 1.0, 2.0, 3.0], f"by op {number} of seed {seed}"
    with contextlib.suppress(RemoteError):
        djinn.synchronize()
    assert open_session() is session
    assert not session.lost
    return {"ops": ops, "raised": sum(raised.values()), "kinds": dict(raised.most_common())}


def main() -> None:
    """The full form."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    djinn.configure(threads=1, recover=False)
    djinn.init()
    print(json.dumps(run(arguments.ops, arguments.seed)))


if __name__ == "__main__":
    main()
