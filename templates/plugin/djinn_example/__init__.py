"""A pattern for Djinn: recognises a matrix product that is followed by a ReLU."""

from __future__ import annotations

from djinn.hooks import Pattern, hookimpl
from djinn.planning import linear, matcher, op

djinn_api_version = "2.0"

name = "example"  # unique among patterns

# `linear()` is any product with a weight, whichever op PyTorch makes of it; views and casts may stand in between.
PATTERN = matcher(
    name,
    linear()["product"] >> op("relu")["relu"],
    confidence=0.9,
    reason="{relu} is applied to the result of {product}",
    details=lambda found: {"features": found.meta("relu").shape[-1]},
    tolerates_growth=True,  # what the functions here say does not depend on how long a cache is
)


@hookimpl
def djinn_register_patterns() -> list[Pattern]:
    """The patterns that this plugin offers."""
    return [PATTERN]
