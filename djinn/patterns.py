"""Pattern API: a small matching language over ops, families of ops, and the data flow of a graph."""

from __future__ import annotations

from djinn_core.ir.flow import COPIES, Flow, is_view
from djinn_core.ir.op_families import (
    ACTIVATION,
    CONVOLUTION,
    EMBEDDING,
    LOSS,
    MATRIX_PRODUCT,
    NORMALISATION,
    OPTIMIZER,
    POOLING,
    is_backward,
    weights_of,
)
from djinn_core.planning.matching.gradients import Gradients
from djinn_core.planning.matching.layers import Layer, is_given, layer_at, linear
from djinn_core.planning.matching.match_result import Found, Place
from djinn_core.planning.matching.matcher import Matcher, matcher
from djinn_core.planning.matching.structure import Structure, structure
from djinn_core.planning.matching.terms import Term, anything, computed, op, optional, outside, through

__all__ = [
    "ACTIVATION",
    "CONVOLUTION",
    "COPIES",
    "EMBEDDING",
    "LOSS",
    "MATRIX_PRODUCT",
    "NORMALISATION",
    "OPTIMIZER",
    "POOLING",
    "Flow",
    "Found",
    "Gradients",
    "Layer",
    "Matcher",
    "Place",
    "Structure",
    "Term",
    "anything",
    "computed",
    "is_backward",
    "is_given",
    "is_view",
    "layer_at",
    "linear",
    "matcher",
    "op",
    "optional",
    "outside",
    "structure",
    "through",
    "weights_of",
]
