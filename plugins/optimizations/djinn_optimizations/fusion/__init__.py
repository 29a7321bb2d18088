"""Fuse linear layers with a common input, and fold batch norms into the convolutions before them."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Optimization, hookimpl
from djinn_optimizations.fusion.folding import FoldBatchNorms
from djinn_optimizations.fusion.projections import FuseProjections

djinn_api_version = "2.0"


@hookimpl
def djinn_register_optimizations() -> Iterable[Optimization]:
    """Return the optimizations `fuse_projections` and `fold_batch_norms`."""
    return [FuseProjections(), FoldBatchNorms()]
