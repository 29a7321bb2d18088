"""Random programs of few ops for the C++ of djinn_native.

`python -m evaluation sanitizers` runs 100,000 under sanitizers. Each program makes tensors, views them, writes into
them, changes their storages and metadata in place, differentiates, copies and drops them. An op that PyTorch rejects is
rejected on both devices and skipped. Most programs run only remotely. One in `COMPARED` also runs on the CPU, and all
tensors must be equal.
"""

# ruff: noqa: PLW0108 - a list of lambdas, each of which may fail
from __future__ import annotations

import argparse
import copy
import os
import random
import threading
from collections.abc import Callable
from typing import Final

import torch

import djinn  # noqa: F401 - the device

REMOTE: Final = "remote_accelerator:0"
COMPARED: Final = 20
HELD: Final = 6  # number of tensors of a program
OPS: Final = 20  # maximum number of ops of a program
Pool = list[torch.Tensor]
Action = Callable[[random.Random, Pool, str], torch.Tensor | None]


def _shape(rng: random.Random) -> list[int]:
    return [rng.choice((0, 1, 2, 3, 4)) for _ in range(rng.randrange(4))]


def _any(rng: random.Random, pool: Pool) -> torch.Tensor:
    return rng.choice(pool)


def _first(t: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` zeros as indexes, because the remote device rejects indexes out of range only at the fetch."""
    if not t.dim() or not t.shape[0]:
        raise IndexError
    return torch.zeros(count, dtype=torch.int64, device=t.device)


def _made(rng: random.Random, _pool: Pool, device: str) -> torch.Tensor:
    shape = _shape(rng)
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: torch.arange(12.0, device=device).view(3, 4),
        lambda: torch.ones(shape, device=device),
        lambda: torch.zeros(
            shape, dtype=rng.choice((torch.float64, torch.int64, torch.bool, torch.complex64)), device=device
        ),
        lambda: torch.full(shape, rng.randrange(-3, 4), device=device),
        lambda: torch.tensor([0.5, -1.0, 2.0]).to(device),
        lambda: torch.empty_strided((3, 2), (1, 3), device=device).fill_(1.5),
        lambda: torch.ones(shape, device=device, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(2, 3, device=device)),
    ]
    return rng.choice(kinds)()


def _viewed(rng: random.Random, pool: Pool, _device: str) -> torch.Tensor:
    t = _any(rng, pool)
    d = rng.randrange(-1, max(t.dim(), 1))
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: t[..., ::2],
        lambda: t[1:],
        lambda: t[0],
        lambda: t[None],
        lambda: t.select(d, -1),
        lambda: t.transpose(d, 0),
        lambda: t.reshape(-1),
        lambda: t.view(-1),
        lambda: t.expand(2, *t.shape),
        lambda: t.unflatten(d, (2, -1)),
        lambda: t.diagonal(),
        lambda: t.view(torch.int32),
        lambda: torch.view_as_real(t),
        lambda: t.conj(),
        lambda: t.imag,
        lambda: t.unfold(d, 2, 1),
        lambda: t.as_strided((2,), (1,), 1),
        lambda: t.split(2, d)[-1],
        lambda: t.detach(),
        lambda: t.squeeze(),
        lambda: t.data,
    ]
    return rng.choice(kinds)()


def _computed(rng: random.Random, pool: Pool, _device: str) -> torch.Tensor:
    t, other = _any(rng, pool), _any(rng, pool)
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: t + other,
        lambda: t * 0.5,
        lambda: t - rng.randrange(3),
        lambda: t @ other,
        lambda: torch.cat([t, other]),
        lambda: torch.stack([t, t]),
        lambda: t.sum(),
        lambda: t.mean(-1, keepdim=True),
        lambda: t.float().softmax(-1),
        lambda: t.cumsum(0),
        lambda: t > 0,
        lambda: torch.where(t > 0, t, other),
        lambda: t.to(torch.float64),
        lambda: t.contiguous(),
        lambda: t.sort(-1)[0],
        lambda: t.index_select(0, _first(t, 2)),
        lambda: t[t > 0],
        lambda: torch.nn.functional.linear(t, other),
        lambda: torch.nn.functional.layer_norm(t, t.shape[-1:]),
        lambda: t.max(-1)[1],
        lambda: t.clone(),
        lambda: copy.deepcopy(t),
        lambda: torch.zeros_like(t),
        lambda: t.new_ones(2, 2),
        lambda: torch._foreach_add([t, other], 1.0)[-1],
        lambda: t.cpu().to(t.device, copy=True),
    ]
    return rng.choice(kinds)()


def _written(rng: random.Random, pool: Pool, device: str) -> torch.Tensor | None:
    t, other = _any(rng, pool), _any(rng, pool)
    kinds: list[Callable[[], object]] = [
        lambda: t.add_(1),
        lambda: t.mul_(other),
        lambda: t.copy_(other),
        lambda: t.zero_(),
        lambda: t.fill_(2),
        lambda: t.resize_(_shape(rng)).fill_(1),  # new memory is uninitialised
        lambda: t.squeeze_(),
        lambda: t.t_(),
        lambda: t.transpose_(0, -1),
        lambda: t.unsqueeze_(0),
        lambda: t.set_(other),
        lambda: t.set_(other.untyped_storage()),
        lambda: t.set_(torch.ones(40, dtype=t.dtype, device=device).untyped_storage().resize_(rng.randrange(40))),
        lambda: t.untyped_storage().resize_(t.untyped_storage().nbytes()),
        lambda: t.index_fill_(0, _first(t, 1), 3),
        lambda: t.masked_fill_(t > 0, 1),
        lambda: t.__setitem__(0, 4),
        lambda: t.requires_grad_(),
        lambda: t.detach_(),
        lambda: setattr(t, "data", other),
        lambda: torch.add(t, other, out=t),
        lambda: t.as_strided_((2,), (1,)),
        lambda: torch._foreach_mul_([t], 2.0),
    ]
    rng.choice(kinds)()
    return None


def _differentiated(rng: random.Random, pool: Pool, _device: str) -> torch.Tensor | None:
    t = _any(rng, pool)
    loss = (t * t).sum()
    if rng.random() < 0.5:
        loss.backward()
        return t.grad
    (result,) = torch.autograd.grad(loss, [t], create_graph=rng.random() < 0.5)
    return result


def _dropped(rng: random.Random, pool: Pool, _device: str) -> None:
    if len(pool) > 1:
        pool.pop(rng.randrange(len(pool)))


_ACTIONS: Final[tuple[Action, ...]] = (
    *[_made, _viewed, _viewed, _viewed, _computed, _computed, _computed, _written, _written, _differentiated, _dropped],
)
_REFUSED: Final = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)


def run(seed: int, device: str) -> tuple[Pool, list[str]]:
    """Run the program with this seed on a device. Return its tensors, and the errors of rejected ops."""
    rng = random.Random(seed)
    pool: Pool = [_made(rng, [], device)]
    refusal: list[str] = []
    for _ in range(rng.randrange(4, OPS)):
        state = rng.getstate()
        try:
            output = rng.choice(_ACTIONS)(rng, pool, device)
        except _REFUSED as error:
            refusal.append(f"{type(error).__name__}: {error}".split("\n")[0][:100])
            output = None
        # An action may be rejected before or after its last draw.
        rng.setstate(state)
        rng.random()
        if output is not None:
            pool.append(output)
            del pool[:-HELD]
    return pool, refusal


def _steps(t: torch.Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element."""
    return [step for length, step in zip(t.shape, t.stride(), strict=True) if length > 1] if t.numel() else []


def _kinds(refused: list[str]) -> list[str]:
    """Return the errors' kinds except NotImplementedError, which the remote device may raise only at the fetch."""
    kinds = [line.split(":")[0] for line in refused]
    return [kind for kind in kinds if kind != "NotImplementedError"]


def check(seed: int) -> None:
    """Run the program with this seed on both devices, and compare the tensors.

    Raises:
        AssertionError: they differ.
    """
    (here, refused_here), (there, refused_there) = run(seed, "cpu"), run(seed, REMOTE)
    kinds_here, kinds_there = map(_kinds, (refused_here, refused_there))
    assert kinds_here == kinds_there, (seed, refused_here, refused_there)
    assert len(here) == len(there), seed
    for ours, theirs in zip(there, here, strict=True):
        facts = [(t.shape, _steps(t), t.dtype, t.requires_grad) for t in (ours, theirs)]
        assert facts[0] == facts[1], (seed, facts)
        torch.testing.assert_close(
            ours.detach().cpu(), theirs.detach(), equal_nan=True, msg=lambda text: f"{seed}: {text}"
        )


def run_many(seeds: range, compared: int = COMPARED) -> list[str]:
    """Run the programs with these seeds, and return the differences. Every `compared`-th program also runs on the CPU."""
    results: list[str] = []
    for seed in seeds:
        try:
            if seed % compared == 0:
                check(seed)
            else:
                run(seed, REMOTE)
        except AssertionError as error:
            results.append(str(error)[:2000])
    return results


def main() -> None:
    """Run the programs in several threads."""
    os.environ.pop("LD_PRELOAD", None)  # the executor limits its memory, but address sanitizers need much
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    results: list[str] = []
    share = -(-arguments.programs // arguments.threads)
    starts = [arguments.seed + share * n for n in range(arguments.threads)]
    threads = [threading.Thread(target=lambda s=s: results.extend(run_many(range(s, s + share)))) for s in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for line in results:
        print(line)
    print(f"{arguments.programs:,} programs, {len(results)} differ")
    raise SystemExit(bool(results))


if __name__ == "__main__":
    main()
