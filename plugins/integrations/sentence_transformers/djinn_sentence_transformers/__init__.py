"""sentence-transformers finds the remote device by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from djinn.hooks import Integration, hookimpl
from djinn.libraries import DEVICE_NAME, Adapter, is_the_only_accelerator, rebind

djinn_api_version = 1


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """The module that chooses the device."""
    return [Adapter("sentence_transformers.util", adapt_util)]


def adapt_util(module: Any) -> None:
    """`sentence_transformers.util`: models that are told no device go to the remote one."""
    chosen = module.get_device_name

    @functools.wraps(chosen)
    def get_device_name() -> str:
        name: str = chosen()
        return f"{DEVICE_NAME}:0" if name == "cpu" and is_the_only_accelerator() else name

    rebind(chosen, get_device_name, ("sentence_transformers",))
