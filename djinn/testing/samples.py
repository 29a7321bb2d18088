"""Small sample graphs that contain the special cases which a plugin must handle."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from djinn.testing.builders import ProgramBuilder
from djinn_core.ir.graph import Graph


def sample_graphs() -> Mapping[str, Graph]:
    """Return graphs by name: no ops, a perceptron, attention, writes through views, randomness, repeated and dead code."""
    makers = (empty, perceptron, fused_attention, attention_in_parts, mutation, randomness, repetition)
    return {maker.__name__: maker() for maker in makers}


def empty() -> Graph:
    """Return a graph without ops."""
    return ProgramBuilder().graph()


def perceptron(batch: int = 8, width: int = 32) -> Graph:
    """Return a graph of two linear layers with a ReLU between them."""
    builder = ProgramBuilder()
    x, w1, w2 = builder.input(batch, width), builder.input(width, 4 * width), builder.input(4 * width, width)
    hidden = builder.op("aten::mm", x, w1, shape=(batch, 4 * width), module="mlp.up")
    active = builder.op("aten::relu", hidden, shape=(batch, 4 * width), module="mlp.act")
    builder.op("aten::mm", active, w2, shape=(batch, width), module="mlp.down")
    builder.drop(hidden, active)
    return builder.graph()


def fused_attention(heads: int = 4, length: int = 16, width: int = 8) -> Graph:
    """Return a graph with one `scaled_dot_product_attention`."""
    builder = ProgramBuilder()
    query, key, value = (builder.input(1, heads, length, width) for _ in range(3))
    builder.op("aten::scaled_dot_product_attention", query, key, value, shape=(1, heads, length, width))
    return builder.graph()


def attention_in_parts(heads: int = 4, length: int = 16, width: int = 8) -> Graph:
    """Return a graph of unfused attention: two batched matrix products with a softmax between them."""
    builder = ProgramBuilder()
    query, value = builder.input(heads, length, width), builder.input(heads, length, width)
    key = builder.view("aten::transpose.int", builder.input(heads, length, width), shape=(heads, width, length))
    scores = builder.op("aten::bmm", query, key, shape=(heads, length, length))
    scaled = builder.op("aten::div.Scalar", scores, shape=(heads, length, length), slots=(width**0.5,))
    weights = builder.op("aten::_softmax", scaled, shape=(heads, length, length), slots=(-1,))
    builder.op("aten::bmm", weights, value, shape=(heads, length, width))
    builder.drop(scores, scaled, weights)
    return builder.graph()


def mutation() -> Graph:
    """Return a graph with a write through a view.

    An op reads the value before the write, and another op reads it afterwards.
    """
    builder = ProgramBuilder()
    x = builder.input(4, 4)
    before = builder.op("aten::sum", x, shape=())
    row = builder.view("aten::select.int", x, shape=(4,), slots=(0, 1))
    builder.inplace("aten::add_.Scalar", row, slots=(1.0, 1))
    after = builder.op("aten::sum", x, shape=())
    builder.op("aten::sub.Tensor", after, before, shape=(), slots=(1,))
    builder.drop(row)
    return builder.graph()


def randomness() -> Graph:
    """Return a graph with two draws from one generator. The first draw advances the state for the second."""
    builder = ProgramBuilder()
    x = builder.input(16)
    unused = builder.op("aten::rand_like", x, shape=(16,), random=True)
    noise = builder.op("aten::rand_like", x, shape=(16,), random=True)
    builder.op("aten::add.Tensor", x, noise, shape=(16,), slots=(1,))
    builder.drop(unused, noise)
    return builder.graph()


def repetition() -> Graph:
    """Return a graph with repeated computations, scalars that differ only in type, and an unused result."""
    builder = ProgramBuilder()
    x = builder.input(8, 8, dtype=torch.int64)
    first = builder.op("aten::mul.Scalar", x, shape=(8, 8), slots=(2,))
    second = builder.op("aten::mul.Scalar", x, shape=(8, 8), slots=(2,))
    float_product = builder.op("aten::mul.Scalar", x, shape=(8, 8), slots=(2.0,), dtype=torch.float32)
    unused = builder.op("aten::neg", x, shape=(8, 8))
    total = builder.op("aten::add.Tensor", first, second, shape=(8, 8), slots=(1,))
    builder.op("aten::add.Tensor", total, float_product, shape=(8, 8), slots=(1,), dtype=torch.float32)
    builder.drop(first, second, float_product, unused, total)
    return builder.graph()
