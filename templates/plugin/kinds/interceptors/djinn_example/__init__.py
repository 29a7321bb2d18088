"""An interceptor for Djinn: sees every op that PyTorch dispatches on any thread that installed it, and counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from djinn.hooks import Interceptor, hookimpl

djinn_api_version = "2.0"


class _Counting(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class ExampleInterceptor:
    """Counts ops by name while it is installed, on the thread that installed it."""

    name = "example"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._installed = ExitStack()

    def install(self) -> None:
        """Start counting."""
        self._installed.enter_context(_Counting(self.counts))

    def uninstall(self) -> None:
        """Stop counting."""
        self._installed.close()


@hookimpl
def djinn_register_interceptors() -> list[Interceptor]:
    """The interceptors that this plugin offers."""
    return [ExampleInterceptor()]
