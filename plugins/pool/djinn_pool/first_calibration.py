"""Calibration at first use: background processes measure devices of a pool that have no stored calibration.

The program does not wait for these processes, which may outlive it. The results are stored in the cache directory. If the
session is still open afterwards, it plans its programs again.
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

LIMIT_SECONDS: Final = 900.0  # time limit of a process on a busy machine
_log = get_logger("djinn.calibration")


def command_among(models: Iterable[CostModel]) -> Sequence[str]:
    """Return Python's arguments for a command that measures a device, or an empty tuple if no cost model has one."""
    return next((command for m in models if (command := tuple(m.background_command()))), ())


def never_measured(opened: Iterable[OpenSession]) -> list[OpenSession]:
    """Return one session for each device model without a stored calibration."""
    makes = {calibration_file(session.attached.device): session for session in opened}
    return [session for session in makes.values() if calibration_of(session.attached.device) is None]


def environment_for(one: OpenSession, settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for a process whose only device is the device of the session `one`.

    Args:
        one: the session with the device.
        settings: settings of this program.
        environment: environment variables of this program.
    """
    variables = {
        name: value for name, value in environment.items() if name not in {"DJINN_CONNECTION_FILE", "DJINN_SERVERS"}
    }
    device = one.attached.device
    variables |= {"DJINN_EXECUTORS": "1", "DJINN_RECOVER": "0", "DJINN_CALIBRATE": "0"}
    servers = find_servers(settings) if one.executor is None else None
    if servers is None:
        threads = {} if settings.threads is None else {"DJINN_THREADS": str(settings.threads)}
        return variables | {"DJINN_DEVICE": settings.device} | threads
    tls = servers.tls
    variables |= {"DJINN_SERVERS": one.server, "DJINN_TOKEN": servers.token, "DJINN_SERVER_DEVICES": device.id}
    files = {"DJINN_TLS_AUTHORITY": tls.authority, "DJINN_TLS_CERTIFICATE": tls.certificate, "DJINN_TLS_KEY": tls.key}
    variables |= {name: str(path) for name, path in files.items() if path is not None}
    return variables | ({"DJINN_TLS_FINGERPRINTS": ",".join(tls.fingerprints)} if tls.fingerprints else {})


def calibrate_in_background(
    opened: Sequence[OpenSession], settings: Settings, models: Iterable[CostModel], on_success: Callable[[], None]
) -> threading.Thread | None:
    """Measure devices without a stored calibration in background processes. Call `on_success` if at least one was measured.

    Return the thread that runs the processes. Return None if no device needs a measurement, no cost model can measure, or
    the setting `calibrate` is off. A single executor is not measured, because assumed speeds suffice to compare its ops.
    """
    if len(opened) < 2 or not settings.calibrate or not (command := command_among(models)):
        return None
    environments = [environment_for(session, settings, os.environ) for session in never_measured(opened)]
    if not environments:
        return None
    thread = threading.Thread(
        target=_measure, args=(command, environments, on_success), name="djinn-calibration", daemon=True
    )
    thread.start()
    return thread


def _measure(command: Sequence[str], environments: Sequence[Mapping[str, str]], on_success: Callable[[], None]) -> None:
    measured_count = 0
    for environment in environments:
        try:
            process = subprocess.run(
                [sys.executable, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                start_new_session=True,  # Ctrl-C must reach the program only
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _log.info("a device could not be calibrated in the background, plans use assumed speeds", error=repr(error))
            continue
        measured_count += process.returncode == 0
        if process.returncode:
            error_text = process.stderr.decode(errors="replace")[-500:]
            _log.info("a device could not be calibrated in the background: try `djinn calibrate`", error=error_text)
    if measured_count:
        on_success()
