"""`torch.compile(backend="djinn")`: a graph that Dynamo has traced is recorded in one step."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Interceptor, hookimpl
from djinn_integrations.dynamo.interceptor import DynamoInterceptor

djinn_api_version = "2.0"


@hookimpl
def djinn_register_interceptors() -> Iterable[Interceptor]:
    """The interceptor `dynamo`."""
    return [DynamoInterceptor()]
