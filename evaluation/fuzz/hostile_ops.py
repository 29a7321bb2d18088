"""Ops with hostile arguments beside tensors that must stay unchanged, and programs of hundreds of such ops.

    python -m evaluation hostile-ops [--ops 10000] [--seed 0] [--first 0]

An op may raise anything. Bugs are: a lost or recovered session, a changed tensor, a dead process, and an op that takes
longer than five minutes. Each op depends only on the seed and its number, so `--first NUMBER --ops 1` repeats it. The
last line is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import djinn
from djinn.testing import open_session
from djinn_core.errors import RemoteError, SessionLost
from evaluation.fuzz.hostile_calls import COUNTS, NUMBERS, REMOTE, SIZES, TEXTS, call, nested

CHECKED_EVERY = 50
PROGRAM_EVERY = 500  # ops between programs
PROGRAM_OPS = 250
POOL = 12  # tensors of a program that its ops may use
SECONDS = 300.0  # timeout for one op or program on a busy machine
DATA_BYTES = 4 << 30  # memory limit of a process: larger requests fail instead of filling the machine
Make = Callable[[random.Random, torch.Tensor], Any]


def sizes(rng: random.Random) -> Any:
    """Return a random shape, which may be long, nested or of the wrong type."""
    kind = rng.randrange(6)
    if kind == 0:
        return [1] * rng.choice(COUNTS[:-1])
    if kind == 1:
        return [rng.choice(SIZES) for _ in range(rng.choice((1, 2, 3, 64, 65, 128, 129)))]
    if kind == 2:
        return nested(rng.choice((1, 2, 20, 70)))
    if kind == 3:
        return rng.choice(NUMBERS)
    return [rng.choice(SIZES[:4]) for _ in range(rng.randrange(5))]


def tensors(rng: random.Random, one: torch.Tensor) -> list[torch.Tensor]:
    """Return a list of tensors, which may be long."""
    return [one] * rng.choice(COUNTS)


FACTORIES: tuple[Callable[..., Any], ...] = (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn)
MAKES: tuple[Make, ...] = (
    lambda rng, _: rng.choice(FACTORIES)(sizes(rng), device=REMOTE),
    lambda rng, _: torch.full(sizes(rng), rng.choice(NUMBERS), device=REMOTE),
    lambda rng, _: torch.empty([1] * rng.choice(COUNTS[:8])).to(REMOTE),
    lambda rng, _: torch.tensor(nested(rng.choice((1, 65, 128, 129, 200))), device=REMOTE),
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


class Witnesses:
    """Tensors that no op gets, with their expected contents."""

    def __init__(self) -> None:
        self.expected = [torch.arange(4.0), torch.arange(6).reshape(2, 3).mT, torch.tensor([True, False])]
        self.there = [item.to(REMOTE) for item in self.expected]
        self.there.append(self.there[0] * 2)  # result of an op
        self.expected.append(self.expected[0] * 2)

    def check(self, where: str) -> None:
        """Raise AssertionError if a tensor has changed. `where`: description of the last op, for the message."""
        for expected, there in zip(self.expected, self.there, strict=True):
            assert torch.equal(there.cpu(), expected), f"a tensor has changed by {where}"


def one_op(rng: random.Random) -> None:
    """Run one hostile op; sometimes fetch or differentiate its results."""
    if rng.random() < 0.2:
        output = rng.choice(MAKES)(rng, torch.arange(4.0).to(REMOTE))
    else:
        _, do = call(rng)
        output = do()
    way = rng.random()
    for tensor in pytree.tree_leaves(output)[:3]:
        if isinstance(tensor, torch.Tensor) and tensor.numel() < 100:
            if way < 0.2:
                tensor.cpu()
            elif way < 0.4 and tensor.requires_grad:
                tensor.real.sum().backward()


def program(rng: random.Random, raised: Counter[str]) -> None:
    """Run hundreds of ops on each other's results, then fetch everything."""
    pool = [torch.rand(3, 4).to(REMOTE), torch.arange(12).reshape(3, 4).to(REMOTE), torch.eye(4).to(REMOTE)]
    beyond = torch.tensor([99]).to(REMOTE)
    for _ in range(PROGRAM_OPS):
        try:
            if rng.random() < 0.1:  # an op that fails on the executor
                rng.choice(pool).index_fill_(0, beyond, 1)
                continue
            _, do = call(rng, pool)
            outputs = [
                t for t in pytree.tree_leaves(do()) if isinstance(t, torch.Tensor) and t.device.type == REMOTE[:-2]
            ]
        except SessionLost:
            raise
        except Exception as error:
            raised[type(error).__name__] += 1
            continue
        for tensor in outputs[:2]:
            if tensor.numel() < 100 and tensor.dim() < 9:
                if len(pool) > POOL:
                    pool.pop(rng.randrange(len(pool)))
                pool.append(tensor)
    for tensor in pool:
        with contextlib.suppress(RemoteError, RuntimeError):
            tensor.cpu()


def run(ops: int, seed: int, first: int = 0, note: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Run `ops` hostile ops from number `first` on. Return their number, and the numbers of raised exceptions by type.

    Raises:
        AssertionError: a tensor has changed.
        SessionLost: the session was lost.
    """
    witnesses = Witnesses()
    session = open_session()
    raised: Counter[str] = Counter()
    programs = 0
    for number in range(first, first + ops):
        note(number)
        rng = random.Random(f"{seed} {number}")
        where = f"op {number} of seed {seed}"
        try:
            if number % PROGRAM_EVERY == PROGRAM_EVERY // 2:
                programs += 1
                program(rng, raised)
            else:
                one_op(rng)
        except SessionLost as error:
            raise SessionLost(f"{where}: {error}") from error
        except Exception as error:  # an op may raise anything
            raised[type(error).__name__] += 1
        if number % CHECKED_EVERY == 0 or number == first + ops - 1 or number % PROGRAM_EVERY == PROGRAM_EVERY // 2:
            witnesses.check(where)
    with contextlib.suppress(RemoteError):
        djinn.synchronize()
    assert open_session() is session
    assert not session.lost
    op_count = ops + programs * (PROGRAM_OPS - 1)
    return {"ops": op_count, "programs": programs, "raised": sum(raised.values()), "kinds": dict(raised.most_common())}


def work(arguments: argparse.Namespace) -> None:
    """Run all ops from `first` on in a process that may die. Findings are printed as JSON lines."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    progress = mmap.mmap(arguments.progress, 8)
    djinn.configure(threads=1, recover=False)
    djinn.init()

    def note(number: int) -> None:
        progress[:8] = struct.pack("<Q", number)
        faulthandler.dump_traceback_later(SECONDS, exit=True)

    first, end = arguments.first, arguments.first + arguments.ops
    while first < end:
        count = min(1000, end - first)
        try:
            print(json.dumps(run(count, arguments.seed, first, note)), flush=True)
            first += count
        except (SessionLost, AssertionError) as error:
            (number,) = struct.unpack("<Q", progress[:8])
            print(json.dumps({"ops": number + 1 - first, "bug": f"{type(error).__name__}: {error}"}), flush=True)
            first = number + 1
            djinn.shut_down()
            djinn.init()


def supervise(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all ops in processes, and continue after a process dies."""
    bugs: list[str] = []
    totals: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    first, end = arguments.first, arguments.first + arguments.ops
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), 8)
        while first < end:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "evaluation.fuzz.hostile_ops",
                "--seed",
                arguments.seed,
                "--progress",
                file.fileno(),
            ]
            command += ["--first", first, "--ops", end - first]
            process = subprocess.Popen(map(str, command), pass_fds=[file.fileno()], stdout=subprocess.PIPE)
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith(b"{"):
                    continue  # printed by an op
                report = json.loads(line)
                totals.update({key: report[key] for key in ("ops", "programs", "raised") if key in report})
                kinds.update(report.get("kinds", {}))
                print(f"{totals['ops']:,} ops", file=sys.stderr, flush=True)
                if "bug" in report:
                    bugs.append(report["bug"])
                    print(report["bug"], flush=True)
            if process.wait():
                (number,) = struct.unpack("<Q", os.pread(file.fileno(), 8, 0))
                bugs.append(f"op {number} of seed {arguments.seed}: the process ended with {process.returncode}")
                print(bugs[-1], flush=True)
                first = number + 1
            else:
                first = end
    return {**totals, "kinds": dict(kinds.most_common()), "seed": arguments.seed, "bugs": bugs}


def main() -> None:
    """Run hostile ops as the command line says, and print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--progress", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.progress is not None:
        work(arguments)
        return
    result = supervise(arguments)
    print(json.dumps(result))
    sys.exit(bool(result["bugs"]))


if __name__ == "__main__":
    main()
