"""Directories of the user for Djinn's files: cache, state, configuration, and runtime files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import platformdirs

_NAME: Final = "djinn"


def cache_directory() -> Path:
    """Return the directory for files that can be regenerated: `$XDG_CACHE_HOME/djinn`, by default `~/.cache/djinn`."""
    return platformdirs.user_cache_path(_NAME)


def state_directory() -> Path:
    """Return the directory for files that must persist: `$XDG_STATE_HOME/djinn`, by default `~/.local/state/djinn`."""
    return platformdirs.user_state_path(_NAME)


def configuration_directory() -> Path:
    """Directory of the configuration file: `$XDG_CONFIG_HOME/djinn`, by default `~/.config/djinn`."""
    return platformdirs.user_config_path(_NAME)


def runtime_directory() -> Path:
    """Return the directory for files of the current login: `$XDG_RUNTIME_DIR/djinn`, else the state directory.

    platformdirs is not used here: without the variable it names `/run/user` or a temporary folder, which services lack.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / _NAME if base else state_directory()
