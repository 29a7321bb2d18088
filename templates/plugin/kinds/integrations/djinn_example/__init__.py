"""An integration for Djinn: compute `statistics.fmean` of a remote tensor on the remote device."""

import functools
from typing import Any

from djinn.compat import LazyTensor
from djinn.hooks import Integration, hookimpl

djinn_api_version = "2.0"


def adapt_statistics(module: Any) -> None:
    """Adapt the module `statistics`. Without it, `fmean` would fetch the elements one by one."""
    computed = module.fmean

    @functools.wraps(computed)
    def fmean(data: Any, *weights: Any, **named: Any) -> float:
        if isinstance(data, LazyTensor) and not (weights or named):
            return data.double().mean().item()
        return computed(data, *weights, **named)

    module.fmean = fmean


@hookimpl
def djinn_register_integrations() -> list[Integration]:
    """Return the integrations of this plugin."""
    return [Integration("example", "statistics", adapt_statistics)]
