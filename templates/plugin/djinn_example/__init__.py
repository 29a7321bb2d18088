"""A pattern for Djinn: recognise a matrix product and the ReLU of its result."""

from __future__ import annotations

from djinn.hooks import Pattern, hookimpl
from djinn.planning import linear, matcher, op

djinn_api_version = "2.0"

name = "example"  # unique among patterns

# `linear()` matches each op that computes a product with a weight. Views and casts between the ops are ignored.
PATTERN = matcher(
    name,
    linear()["product"] >> op("relu")["relu"],
    confidence=0.9,
    reason="{relu} is applied to the result of {product}",
    details=lambda found: {"features": found.meta("relu").shape[-1]},
    tolerates_growth=True,  # the results of these functions do not depend on the length of a cache
)


@hookimpl
def djinn_register_patterns() -> list[Pattern]:
    """Return the patterns of this plugin."""
    return [PATTERN]
