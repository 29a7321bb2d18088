"""Calibration at first use: devices of a pool that were never measured are measured by processes of their own, in the background.

The program does not wait for them, and they go on when it ends: what they find is in the cache directory for the next one. A session
that is still open then plans anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from djinn_client.runtime.connecting.open import OpenSession
from djinn_client.runtime.connecting.servers import find_servers
from djinn_client.runtime.planning.calibrations import calibration_file, calibration_of
from djinn_core.hookspecs.cost_models import CostModel
from djinn_core.logs import get_logger
from djinn_core.settings import Settings

LIMIT_SECONDS: Final = 900.0  # that a process may take on a busy machine
_log = get_logger("djinn.calibration")


def command_among(models: Iterable[CostModel]) -> Sequence[str]:
    """Arguments of Python with which the first of the cost models measures a device; empty if none does."""
    return next((command for m in models if (command := tuple(m.background_command()))), ())


def never_measured(opened: Iterable[OpenSession]) -> list[OpenSession]:
    """Sessions on devices that were not measured, one of each make."""
    makes = {calibration_file(one.attached.device): one for one in opened}
    return [one for one in makes.values() if calibration_of(one.attached.device) is None]


def environment_for(one: OpenSession, settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a process that measures the device of `one`, and no other."""
    found = {
        name: value for name, value in environment.items() if name not in {"DJINN_CONNECTION_FILE", "DJINN_SERVERS"}
    }
    device = one.attached.device
    found |= {"DJINN_EXECUTORS": "1", "DJINN_RECOVER": "0", "DJINN_CALIBRATE": "0"}
    servers = find_servers(settings) if one.executor is None else None
    if servers is None:
        threads = {} if settings.threads is None else {"DJINN_THREADS": str(settings.threads)}
        return found | {"DJINN_DEVICE": settings.device} | threads
    tls = servers.tls
    found |= {"DJINN_SERVERS": one.server, "DJINN_TOKEN": servers.token, "DJINN_SERVER_DEVICES": device.id}
    files = {"DJINN_TLS_AUTHORITY": tls.authority, "DJINN_TLS_CERTIFICATE": tls.certificate, "DJINN_TLS_KEY": tls.key}
    found |= {name: str(path) for name, path in files.items() if path is not None}
    return found | ({"DJINN_TLS_FINGERPRINTS": ",".join(tls.fingerprints)} if tls.fingerprints else {})


def calibrate_in_background(
    opened: Sequence[OpenSession], settings: Settings, models: Iterable[CostModel], done: Callable[[], None]
) -> threading.Thread | None:
    """Measure what was never measured, where a cost model can and the setting `calibrate` is on; call `done` when it is.

    Returns the thread that waits for it; None if there is nothing to measure. One executor by itself is not measured: plans
    for it compare ops, which assumed speeds are good for.
    """
    if len(opened) < 2 or not settings.calibrate or not (command := command_among(models)):
        return None
    environments = [environment_for(one, settings, os.environ) for one in never_measured(opened)]
    if not environments:
        return None
    thread = threading.Thread(
        target=_measure, args=(command, environments, done), name="djinn-calibration", daemon=True
    )
    thread.start()
    return thread


def _measure(command: Sequence[str], environments: Sequence[Mapping[str, str]], done: Callable[[], None]) -> None:
    measured = 0
    for environment in environments:
        try:
            ended = subprocess.run(
                [sys.executable, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                start_new_session=True,  # Ctrl-C is for the program
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.info("a device could not be measured in the background", error=repr(error))
            continue
        measured += ended.returncode == 0
        if ended.returncode:
            told = ended.stderr.decode(errors="replace")[-500:]
            _log.info("a device could not be measured in the background; try `djinn calibrate`", error=told)
    if measured:
        done()
