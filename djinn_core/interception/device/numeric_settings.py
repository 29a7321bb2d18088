"""Settings of PyTorch by which kernels are chosen, such as deterministic algorithms and TF32: executors compute under them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from djinn_core import torch_private
from djinn_core.interception.recording.recorder import current, recorders
from djinn_core.interception.runtime_interface import port
from djinn_core.wire.numeric_messages import NumericSettings


def install() -> None:
    """Note the settings of this process from now on."""
    port.numeric_settings = _now()
    torch_private.wrap_numeric_setters(_noting_changes)


def require_exact(exact: bool) -> None:
    """Note whether the following programs have to be rounded as if their session computed alone."""
    if port.numeric_settings.exact is not exact:
        port.numeric_settings = msgspec.structs.replace(port.numeric_settings, exact=exact)


def _now() -> NumericSettings:
    return NumericSettings(**torch_private.numeric_settings(), exact=port.numeric_settings.exact)


@torch_private.without_modes  # torch.export changes settings in the middle of tracing
def _send_recorded() -> None:
    current().cut_all()


def _noting_changes(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A setter after which ops run under the new settings; what was recorded before is sent first."""

    def set_and_note(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        now = _now()
        if now != port.numeric_settings:
            # What waits for a session to begin runs under the settings of then: changing them starts no server.
            if port.is_open() and any(recorder.entries for recorder in recorders.all()):
                _send_recorded()
            port.numeric_settings = now
        return result

    return set_and_note
