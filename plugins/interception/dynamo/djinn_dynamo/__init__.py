"""`torch.compile(backend="djinn")`: what Dynamo has traced is recorded at a stroke."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Interceptor, hookimpl
from djinn_dynamo.interceptor import DynamoInterceptor

djinn_api_version = 1


@hookimpl
def djinn_register_interceptors() -> Iterable[Interceptor]:
    """The interceptor `dynamo`."""
    return [DynamoInterceptor()]
