"""The pattern `convolution`: convolutions with their bias, norm, activation and residual connection."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Pattern, hookimpl
from djinn_cnn.convolution.pattern import Convolution

djinn_api_version = "2.0"


@hookimpl
def djinn_register_patterns() -> Iterable[Pattern]:
    """Return the pattern `convolution`."""
    return [Convolution()]
