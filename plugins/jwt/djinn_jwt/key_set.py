"""Public keys of an issuer in a JWKS file, reloaded when the file changes."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import attrs

from djinn.errors import ConfigurationError

_log = logging.getLogger("djinn_jwt")


@attrs.frozen
class VerifyingKey:
    """A public key.

    Attributes:
        name: the key's `kid`, or empty if it has none.
        key: PyJWT's object of the key.
    """

    name: str
    key: Any


class KeySet:
    """The public keys of a JWKS file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Read the keys.

        Raises:
            ConfigurationError: the file is invalid.
        """
        self._path = path
        self._lock = threading.Lock()
        self._trouble = ""
        self._version = _version(path)
        self._keys = _read_keys(path)

    def current(self) -> tuple[VerifyingKey, ...]:
        """Return the current keys. Read the file again if it has changed.

        If the changed file is invalid, log a warning and return the previous keys.
        """
        with self._lock:
            try:
                version = _version(self._path)
                if version != self._version:
                    self._keys, self._version, self._trouble = _read_keys(self._path), version, ""
                    _log.info("the key set %s was reloaded: %d keys", self._path, len(self._keys))
            except ConfigurationError as error:
                if str(error) != self._trouble:  # log once, because every connection calls this method
                    _log.warning("%s. The previous keys stay in use", error)
                self._trouble = str(error)
            return self._keys


def _version(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigurationError(f"the key set {path} cannot be read: {error.strerror or error}") from error
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _read_keys(path: Path) -> tuple[VerifyingKey, ...]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigurationError(f"other users can write to the key set {path}: run `chmod go-w {path}`")
            content = json.loads(file.read())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the key set {path} cannot be read: {error}") from error
    entries = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigurationError(f"{path} is not a key set: write a JWKS file, which has a list `keys`")
    keys = tuple(_key(entry, path) for entry in entries if _verifies(entry))
    if not keys:
        raise ConfigurationError(f"the key set {path} has no public key for signatures: add the issuer's key")
    if len({key.name for key in keys}) < len(keys):
        raise ConfigurationError(
            f"two keys of the key set {path} have the same `kid` or none: give each key another `kid`"
        )
    return keys


def _verifies(entry: object) -> bool:
    """Return True if an entry of the key set is a public key for signatures.

    Symmetric keys are excluded, because everyone who can verify with them can also sign.
    """
    return isinstance(entry, dict) and entry.get("kty") != "oct" and entry.get("use", "sig") == "sig"


def _key(entry: dict[str, Any], path: Path) -> VerifyingKey:
    import jwt

    name = str(entry.get("kid", ""))
    try:
        return VerifyingKey(name, jwt.PyJWK(entry))
    except (jwt.PyJWTError, ValueError, KeyError) as error:
        raise ConfigurationError(f"the key {name!r} of the key set {path} cannot be used: {error}") from error
