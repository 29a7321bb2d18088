"""transformers' `generate()` on a remote device does not wait at each token to learn if it should stop."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Interceptor, hookimpl
from djinn_integrations.late_stop.interceptor import LateStopInterceptor

djinn_api_version = "2.0"


@hookimpl
def djinn_register_interceptors() -> Iterable[Interceptor]:
    """The interceptor `late_stop`."""
    return [LateStopInterceptor()]
