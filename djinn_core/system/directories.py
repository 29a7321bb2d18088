"""Directories of the user in which Djinn keeps its files: cache, state, configuration, and what lasts as long as a login."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import platformdirs

_NAME: Final = "djinn"


def cache_directory() -> Path:
    """Directory for what can be made again: `$XDG_CACHE_HOME/djinn`, by default `~/.cache/djinn`."""
    return platformdirs.user_cache_path(_NAME)


def state_directory() -> Path:
    """Directory for what must persist: `$XDG_STATE_HOME/djinn`, by default `~/.local/state/djinn`."""
    return platformdirs.user_state_path(_NAME)


def configuration_directory() -> Path:
    """Directory of the configuration file: `$XDG_CONFIG_HOME/djinn`, by default `~/.config/djinn`."""
    return platformdirs.user_config_path(_NAME)


def runtime_directory() -> Path:
    """Directory for what lasts as long as the user's login: `$XDG_RUNTIME_DIR/djinn`, else the state directory.

    platformdirs would go to `/run/user` or the temporary directory without the variable; a service has neither of its own.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / _NAME if base else state_directory()
