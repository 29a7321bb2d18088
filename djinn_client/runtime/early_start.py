"""Early start of a program's own executors, by `import djinn` before it imports PyTorch.

The setting `start_at_import` decides. By default the executors start if the last run of the same script used executors
of its own. An empty file in the cache directory records this for each script.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from djinn_core.errors import DjinnError
from djinn_core.logs import get_logger
from djinn_core.settings import Settings, resolve
from djinn_core.system.directories import cache_directory

if TYPE_CHECKING:
    from djinn_core.registry.embedded_executors import EmbeddedExecutor

UNUSED_SECONDS: Final = 300.0  # seconds after which unused executors end
SCRIPTS_LIMIT: Final = 512
_log = get_logger("djinn.client")


class EarlyStart(msgspec.Struct, eq=False):
    """Executors that `import djinn` started, until a session takes them.

    Attributes:
        marker: the marker file of the script, which exists if its last run used own executors. None if the program is
            not a script.
        settings: settings with which the executors were started, or None if none were started.
        executors: executors that no session has taken.
    """

    marker: Path | None
    settings: Settings | None = None
    executors: tuple[EmbeddedExecutor, ...] = ()

    def take(self, settings: Settings) -> tuple[EmbeddedExecutor, ...]:
        """Return the executors for a session with these settings.

        Return an empty tuple if settings have changed, or an executor has ended.
        """
        if settings == self.settings and all(executor.alive for executor in self.executors):
            executors, self.executors = self.executors, ()
            return executors
        self.end()
        return ()

    def end(self) -> None:
        """End the unused executors. The next run of this script starts none early."""
        executors, self.executors = self.executors, ()
        for executor in executors:
            executor.close(0.0)
        if executors and self.marker is not None:
            with contextlib.suppress(OSError):
                self.marker.unlink(missing_ok=True)

    def note(self, settings: Settings) -> None:
        """Record that this script uses its own executors, so that its next run starts them early with these settings."""
        marker = self.marker
        if marker is None or settings.start_at_import != "auto" or marker.exists():
            return
        if settings != resolve().settings:  # the import cannot know what the program configures later
            return
        with contextlib.suppress(OSError):
            marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for old_marker in sorted(marker.parent.iterdir(), key=os.path.getmtime)[: 1 - SCRIPTS_LIMIT]:
                old_marker.unlink(missing_ok=True)
            marker.touch(mode=0o600)


process_start: EarlyStart | None = None  # the early start of this process


def begin() -> EarlyStart | None:
    """Start the executors that this program will probably use, and return them. Return None in a worker process."""
    global process_start
    process_start = _new_early_start()
    return process_start


def _new_early_start() -> EarlyStart | None:
    # multiprocessing sets this before a spawned worker imports the program
    if multiprocessing.current_process().name != "MainProcess":
        return None
    marker = _marker()
    try:
        settings = resolve().settings
        if settings.start_at_import == "no" or (
            settings.start_at_import == "auto" and not (marker and marker.exists())
        ):
            return EarlyStart(marker)
        from djinn_client.runtime.connecting.own_executor import start_executors
        from djinn_core.registry.embedded_executors import LOCAL

        executors = start_executors(settings, unused_seconds=UNUSED_SECONDS) if settings.engine == LOCAL else ()
    except DjinnError as error:  # the first use reports the error
        _log.debug("no executor was started before the first use", reason=str(error))
        return EarlyStart(marker)
    return EarlyStart(marker, settings, executors)


def _marker() -> Path | None:
    """Return the path of the script's marker file, or None if the program is not a user's script.

    The path depends on the script's path and time of change, and on the current folder.
    """
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not file:
        return None
    try:
        script = Path(file).resolve()
        # a command that many programs share
        if script.is_relative_to(sys.prefix) or script.is_relative_to(sys.base_prefix):
            return None
        facts = sys.executable, str(script), script.stat().st_mtime_ns, str(Path.cwd())
    except OSError:
        return None
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    return cache_directory() / "starting-early" / digest
