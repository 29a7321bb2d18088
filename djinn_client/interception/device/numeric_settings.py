"""Settings of PyTorch by which kernels are chosen, such as deterministic algorithms and TF32: executors compute under them, too."""

from __future__ import annotations

import msgspec

from djinn_client import torch_dispatch
from djinn_client.interception.native.library import implement
from djinn_client.interception.recording.recorder import current, recorders
from djinn_client.interception.runtime_interface import port
from djinn_core import torch_private
from djinn_core.wire.numeric_messages import NumericSettings


def install() -> None:
    """Note the settings of this process from now on. C++ looks at each op whether they have changed."""
    port.numeric_settings = _now()
    implement(settings_changed=_note_change)


def require_exact(exact: bool) -> None:
    """Note whether the following programs have to be rounded as if their session computed alone."""
    if port.numeric_settings.exact is not exact:
        port.numeric_settings = msgspec.structs.replace(port.numeric_settings, exact=exact)


def _now() -> NumericSettings:
    return NumericSettings(**torch_private.numeric_settings(), exact=port.numeric_settings.exact)


@torch_dispatch.without_modes  # torch.export changes settings in the middle of tracing
def _send_recorded() -> None:
    current().cut_all()


def _note_change() -> None:
    """Ops run under the settings of their time, so what was recorded before a change is sent first."""
    now = _now()
    if now == port.numeric_settings:
        return
    # What waits for a session to begin runs under the settings of then: changing them starts no server.
    if port.is_open() and any(recorder.entries for recorder in recorders.all()):
        _send_recorded()
    port.numeric_settings = now
