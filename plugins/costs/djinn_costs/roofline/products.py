"""Probes of matrix products, convolutions and attention, and of passes over operands that are not cached."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Literal

import attrs
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from djinn.hooks import Probe
from djinn_core.planning.builtins.work import Kind

aten = torch.ops.aten
Family = Literal[
    "product", "convolution", "convolution 1", "grouped", "convolution_backward", "convolution_backward 1", "attention",
    "attention_backward", "recurrent",
]  # fmt: skip
_BUDGET = 2e8  # multiply-adds per probe


@attrs.frozen
class ProductProbe:
    """Probe of one op.

    Attributes:
        family: family of the op.
        dims: batch, rows, columns and contracted dimension.
        probe: the probe.
    """

    family: Family
    dims: tuple[int, int, int, int]
    probe: Probe


def shaped_probes() -> Iterator[ProductProbe]:
    """Yield probes of every family at every size."""
    yield from _products()
    yield from _convolutions()
    yield from _attentions()
    for steps, rows, width in itertools.product((4, 16), (1, 16), (32, 128, 384)):
        dims = (steps, rows, 4 * width, 2 * width)
        yield _shaped_probe("recurrent", f"{steps} {rows} {width}", dims, _recurrent(steps, rows, width))


def _shaped_probe(family: Family, label: str, dims: tuple[int, int, int, int], make: _Make) -> ProductProbe:
    repeats = max(2, min(100, int(_BUDGET / math.prod(dims))))

    def prepare(device: torch.device) -> Callable[[], object]:
        once = make(device)

        def run() -> None:
            for _ in range(repeats):
                once()

        return run

    return ProductProbe(family, dims, Probe(f"{family} {label}", prepare, repeats))


_Make = Callable[[torch.device], Callable[[], object]]


def _products() -> Iterator[ProductProbe]:
    singles = itertools.product((1,), (1, 8, 64, 512), (16, 128, 1024), (16, 128, 1024))
    extremes = ((1, 2048, 1024, 256), (1, 1, 4096, 1024), (1, 128, 4096, 512), (1, 64, 2, 128))
    batched = itertools.product((8, 64), (16, 128), (16, 128), (64,))
    for dims in (*singles, *extremes, *batched):
        yield _shaped_probe("product", " ".join(map(str, dims)), dims, _product(*dims))


def _product(batch: int, rows: int, columns: int, contracted: int) -> _Make:
    def make(device: torch.device) -> Callable[[], object]:
        if batch > 1:
            x, y = (
                torch.rand(batch, rows, contracted, device=device),
                torch.rand(batch, contracted, columns, device=device),
            )
            return lambda: torch.bmm(x, y)
        a, w, b = torch.rand(rows, contracted, device=device), torch.rand(columns, contracted, device=device), None
        return lambda: F.linear(a, w, b)

    return make


def _convolutions() -> Iterator[ProductProbe]:
    """Yield probes of convolutions.

    Kernels of one position have their own families, because these convolutions are matrix products.
    """
    for side, inside, outside, kernel in (
        *itertools.product((7, 28), (16, 64, 256), (16, 64, 256), (1,)),
        *itertools.product((7, 14, 28), (16, 64, 128), (16, 64, 128), (3,)),
        *((56, 64, 64, 3), (112, 16, 16, 3), (14, 256, 256, 3), (56, 3, 32, 7), (112, 3, 32, 3), (32, 3, 16, 3)),
    ):
        dims = (1, side * side, outside, inside * kernel * kernel)
        label = f"{side} {inside} {outside} {kernel}"
        forward: Family = "convolution 1" if kernel == 1 else "convolution"
        yield _shaped_probe(forward, label, dims, _convolution(side, inside, outside, kernel, 1))
        if side < 56:
            backward: Family = "convolution_backward 1" if kernel == 1 else "convolution_backward"
            yield _shaped_probe(backward, label, dims, _convolution_backward(side, inside, outside, kernel))
    for side, channels, kernel in itertools.product((14, 56), (32, 128), (3, 7)):
        dims = (channels, side * side, 1, kernel * kernel)
        label = f"{side} {channels} {kernel}"
        yield _shaped_probe("grouped", label, dims, _convolution(side, channels, channels, kernel, channels))


def _convolution(side: int, inside: int, outside: int, kernel: int, groups: int) -> _Make:
    def make(device: torch.device) -> Callable[[], object]:
        x = torch.rand(1, inside, side, side, device=device)
        w = torch.rand(outside, inside // groups, kernel, kernel, device=device)
        return lambda: F.conv2d(x, w, None, 1, kernel // 2, 1, groups)

    return make


def _convolution_backward(side: int, inside: int, outside: int, kernel: int) -> _Make:
    def make(device: torch.device) -> Callable[[], object]:
        x, g = torch.rand(1, inside, side, side, device=device), torch.rand(1, outside, side, side, device=device)
        w, p = torch.rand(outside, inside, kernel, kernel, device=device), kernel // 2
        return lambda: aten.convolution_backward(
            g, x, w, None, [1, 1], [p, p], [1, 1], False, [0, 0], 1, [True, True, False]
        )

    return make


def _attentions() -> Iterator[ProductProbe]:
    full = [(heads, length, length, 64) for heads, length in ((4, 16), (12, 64), (8, 256), (4, 1024))]
    wide = [(4, 128, 128, 32), (8, 128, 128, 128)]
    decode = [(12, 1, length, 64) for length in (32, 256, 2048)]
    for dims in (*full, *wide, *decode):
        yield _shaped_probe("attention", " ".join(map(str, dims)), dims, _attention(*dims))
    for dims in (*full[:3], *wide):
        yield _shaped_probe("attention_backward", " ".join(map(str, dims)), dims, _attention_backward(*dims))


def _attention(heads: int, queries: int, keys: int, width: int) -> _Make:
    def make(device: torch.device) -> Callable[[], object]:
        q = torch.rand(1, heads, queries, width, device=device)
        k, v = torch.rand(2, 1, heads, keys, width, device=device).unbind()
        return lambda: F.scaled_dot_product_attention(q, k, v)

    return make


def _attention_backward(heads: int, queries: int, keys: int, width: int) -> _Make:
    """Return a function that runs forward and backward together, because devices have many backward kernels."""

    def make(device: torch.device) -> Callable[[], object]:
        q = torch.rand(1, heads, queries, width, device=device, requires_grad=True)
        k, v = (torch.rand(1, heads, keys, width, device=device, requires_grad=True) for _ in range(2))
        g = torch.rand(1, heads, queries, width, device=device)

        def run() -> object:
            with torch.enable_grad():
                return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), g)

        return run

    return make


def _recurrent(steps: int, rows: int, width: int) -> _Make:
    def make(device: torch.device) -> Callable[[], object]:
        x, state = torch.rand(steps, rows, width, device=device), torch.rand(1, rows, width, device=device)
        matrix, bias = torch.rand(4 * width, width, device=device) / width, torch.rand(4 * width, device=device)
        weights = [matrix, matrix.clone(), bias, bias.clone()]
        return lambda: torch.lstm(x, (state, state), weights, True, 1, 0.0, False, False, False)

    return make


# Bytes of weights that a program reads once, so that each weight is in the cache level of such a program.
FOOTPRINTS = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
_SWEPT = 1 << 27  # bytes that one probe reads
_SWEPT_WIDTH = 1024


@attrs.frozen
class SweepProbe:
    """Probe of one pass over many weights.

    Attributes:
        footprint: bytes of all weights.
        count: number of weights.
        probe: the probe.
    """

    footprint: int
    count: int
    probe: Probe


def sweep_probes() -> Iterator[SweepProbe]:
    """Yield a probe for each size in `FOOTPRINTS`. It passes over weights of this total size."""
    for footprint in FOOTPRINTS:
        count = max(4, footprint >> 21)  # tensors of two megabytes, like the weights of models that exceed the caches
        passes = max(2, min(32, _SWEPT // footprint))
        yield SweepProbe(footprint, count, Probe(f"sweep {footprint}", _sweep(footprint, count, passes), passes))


def _sweep(footprint: int, count: int, passes: int) -> _Make:
    def make(device: torch.device) -> Callable[[], object]:
        x = torch.rand(1, _SWEPT_WIDTH, device=device)
        weights = torch.rand(count, footprint // 4 // count // _SWEPT_WIDTH, _SWEPT_WIDTH, device=device).unbind()

        def run() -> None:
            for _ in range(passes):
                for weight in weights:
                    F.linear(x, weight)

        return run

    return make


@attrs.frozen
class SmallOpsProbe:
    """Probe of alternating small ops, as in a model. Less code of each op is cached than if the op ran alone.

    Attributes:
        ops: op, kind and dimensions of each call.
        probe: the probe.
    """

    ops: tuple[tuple[str, Kind, tuple[int, ...]], ...]
    probe: Probe


_TURNS = 30
_BLOCK: tuple[tuple[str, Kind, tuple[int, ...]], ...] = (
    ("embedding", "look_up", (1024,)),
    ("linear", "product", (1, 16, 64, 64)),
    ("native_layer_norm", "normalisation", (1024,)),
    ("gelu", "pointwise", (1024,)),
    ("view", "view", (0,)),
    ("transpose", "view", (0,)),
    ("clone", "copy", (1024,)),
    ("scaled_dot_product_attention", "attention", (2, 16, 16, 32)),
    ("_softmax", "softmax", (1024,)),
    ("add", "pointwise", (1024,)),
    ("mul", "pointwise", (1024,)),
    ("cat", "copy", (2048,)),
    ("select", "view", (0,)),
    ("exp", "pointwise", (64,)),
    ("sum", "reduction", (64,)),
)
_CELL: tuple[tuple[str, Kind, tuple[int, ...]], ...] = (
    ("linear", "product", (1, 16, 64, 64)),
    ("add", "pointwise", (1024,)),
    ("split", "view", (0,)),
    ("sigmoid", "pointwise", (256,)),
    ("sigmoid", "pointwise", (256,)),
    ("tanh", "pointwise", (256,)),
    ("mul", "pointwise", (256,)),
    ("add", "pointwise", (256,)),
    ("tanh", "pointwise", (256,)),
    ("mul", "pointwise", (256,)),
)


def mixed_probes() -> Iterator[SmallOpsProbe]:
    """Yield probes of a transformer block and of a recurrent cell."""
    for name, ops, make in (("block", _BLOCK, _block), ("cell", _CELL, _cell)):
        yield SmallOpsProbe(ops, Probe(f"mixed {name}", _in_turns(make), _TURNS * len(ops)))


def _in_turns(make: _Make) -> _Make:
    def prepare(device: torch.device) -> Callable[[], object]:
        once = make(device)

        def run() -> None:
            for _ in range(_TURNS):
                once()

        return run

    return prepare


def _block(device: torch.device) -> Callable[[], object]:
    x, w = torch.rand(16, 64, device=device), torch.rand(64, 64, device=device)
    b, q = torch.rand(64, device=device), torch.rand(1, 2, 16, 32, device=device)
    indices = torch.randint(0, 64, (16,), device=device)

    def turn() -> None:
        y = F.linear(F.embedding(indices, w), w, b)
        y = F.gelu(torch.native_layer_norm(y, [64], b, b, 1e-5)[0])
        y.view(16, 2, 32).transpose(0, 1).contiguous()
        F.scaled_dot_product_attention(q, q, q)
        y = torch.softmax(x, -1) + x
        torch.cat([y, x * 0.5]).select(0, 0).exp().sum()

    return turn


def _cell(device: torch.device) -> Callable[[], object]:
    x, w, state = (
        torch.rand(16, 64, device=device),
        torch.rand(64, 64, device=device),
        torch.rand(16, 16, device=device),
    )

    def turn() -> None:
        gate, into, candidate, out = (F.linear(x, w) + x).split(16, 1)
        result = torch.sigmoid(gate) * state + torch.sigmoid(into)
        _ = torch.tanh(candidate), torch.tanh(result) * out

    return turn
