"""Operator library of torchvision: `nms`, poolings of regions and `deform_conv2d`, with their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from djinn.hooks import CastPolicy, OperatorLibrary, hookimpl
from djinn_torchvision.checks import CHECKS

djinn_api_version = "2.0"

_CAST = ("nms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


class Torchvision(OperatorLibrary):
    """The ops of torchvision that detection models call. torchvision registers their fake kernels and gradients."""

    name = "torchvision"
    module = "torchvision"
    package = (
        "torchvision and djinn-torchvision (`pip install ./plugins/torchvision` in a checkout of Djinn, or "
        "`pip install FOLDER/djinn_torchvision-*.whl` from a FOLDER of its wheels)"
    )
    operators = frozenset(CHECKS)
    data_dependent = frozenset({"torchvision::nms"})

    def cast_policy(self, op: str) -> CastPolicy | None:
        """Return the policy of an op that autocast computes in float32, as on CUDA. Return None for other ops."""
        packet = op.removeprefix("torchvision::")
        return CastPolicy(restores=packet != "nms") if packet in _CAST else None

    def check(self, op: str, arguments: Mapping[str, Any]) -> None:
        """Check arguments that torchvision's kernels do not check.

        Raises:
            ValueError: an argument is invalid.
        """
        CHECKS[op](arguments)


@hookimpl
def djinn_register_operators() -> Iterable[OperatorLibrary]:
    """Return the operator library of torchvision."""
    return [Torchvision()]
