"""Disk cache of the digest of the allow-list of ops. A client needs the list for nothing else, so it need not make it at each start.

The key is what the digest follows from: the names of PyTorch's own ops that the dispatcher knows, PyTorch's build, and Djinn's files
that decide. Executors make theirs each time: what they allow comes from no file that can be written.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec
import torch

from djinn_core import torch_private
from djinn_core.ir import layout_operators, operators
from djinn_core.logs import get_logger
from djinn_core.system.directories import cache_directory
from djinn_core.system.shared_files import replace_file, version_of

DIGESTS_LIMIT: Final = 64
BYTES_LIMIT: Final = 1 << 16
_NAME: Final = "operators.json"
_log = get_logger("djinn.runtime")


def cached_operators_digest() -> str:
    """As `operators_digest`, from the disk where an earlier process has kept it."""
    path = cache_directory() / _NAME
    try:
        key = _key()
    except OSError:  # Djinn was imported from an archive
        return operators.operators_digest()
    kept = _read(path)
    if (found := kept.get(key)) is None:
        found = kept[key] = operators.operators_digest()
        _write(path, kept)
    return found


def _key() -> str:
    files = [version_of(Path(str(module.__file__))) for module in (operators, layout_operators)]
    known = sorted(name for name in torch_private.dispatched_operators() if name.startswith("aten::"))
    facts = (torch.__version__, torch.version.git_version, files, known)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size <= BYTES_LIMIT:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return {}


def _write(path: Path, kept: dict[str, str]) -> None:
    latest = dict(list(kept.items())[-DIGESTS_LIMIT:])
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(latest))
    except OSError as error:
        _log.debug("the digest of the allow-list is not kept", file=str(path), error=str(error))
