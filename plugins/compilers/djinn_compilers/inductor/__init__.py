"""Compile hot templates with PyTorch's inductor."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Compiler, hookimpl
from djinn_compilers.inductor.compiler import Inductor

djinn_api_version = "2.0"


@hookimpl
def djinn_register_compilers() -> Iterable[Compiler]:
    """Return the compiler `inductor`."""
    return [Inductor()]
