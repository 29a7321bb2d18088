"""Device calibrations on disk: one file for each device, version of PyTorch and number of threads."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from djinn_core.ir.costs import Calibration
from djinn_core.logs import get_logger
from djinn_core.system.directories import cache_directory
from djinn_core.system.shared_files import FileVersion, replace_file, version_of
from djinn_core.wire.messages import DeviceInfo

FORMAT: Final = 1
_log = get_logger("djinn.calibration")


def calibration_file(device: DeviceInfo) -> Path:
    """Return the path of a device's calibration in the user's cache directory.

    The file's name is a digest of properties, because servers choose them and they may be unfit for a file name.
    """
    key = hashlib.blake2b(json.dumps(_identity(device)).encode(), digest_size=8).hexdigest()
    return cache_directory() / "calibration" / f"{key}.json"


def calibration_of(device: DeviceInfo) -> Calibration | None:
    """Return the calibration of `device`, or None if it was not calibrated.

    If the file cannot be read, log a warning and return None.
    """
    file = calibration_file(device)
    try:
        version = version_of(file)
    except FileNotFoundError:
        return None
    return _load(file, version)


def store_calibration(device: DeviceInfo, models: Mapping[str, Any]) -> Path:
    """Store the parameters of cost models for `device`, and return the path of the file.

    `models`: parameters by name of the cost model. Stored parameters of other cost models stay.
    """
    file = calibration_file(device)
    calibration = calibration_of(device)
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    content = {
        "format": FORMAT,
        "device": _identity(device),
        "measured": now,
        "models": {**(calibration.models if calibration else {}), **models},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(content).encode())
    return file


def _identity(device: DeviceInfo) -> dict[str, Any]:
    """Return the properties that determine a device's speed, independent of the server."""
    return {"kind": device.kind, "name": device.name, "torch": device.torch, "threads": device.threads}


@functools.lru_cache(maxsize=64)
def _load(file: Path, _version: FileVersion) -> Calibration | None:
    """Return the content of a version of a file, or None if it is unreadable. Each version is read once."""
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, expected {FORMAT}")
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return Calibration(digest, content["measured"], content["models"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("a calibration cannot be read: run `djinn calibrate` again", file=str(file), error=repr(error))
        return None
