"""The package ucxx, imported on first use."""

from __future__ import annotations

import functools
import os
import re
from types import ModuleType

from djinn.errors import TransportError

_RDMA = re.compile(r"\b(rc|dc|ud|gga|srd|ib|efa|mlx5)(_\w+)?/")


@functools.cache
def library() -> ModuleType:
    """Return the module of ucxx below its asyncio layer.

    Raises:
        TransportError: ucxx is not installed, or does not find UCX.
    """
    # Some builds do not know variables that other parts of ucxx set, and warn of them on standard output.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        from ucxx._lib import libucxx
    except (ImportError, OSError) as error:
        raise TransportError(
            f"ucx:// needs the package ucxx, which cannot be imported ({error}): run `pip install 'ucxx-cu12>=0.52,<0.53'`, or use a tcp:// "
            "or tcps:// address"
        ) from error
    module: ModuleType = libucxx
    return module


def facts() -> str:
    """Return the version of UCX and its transports on this machine, or the reason why UCX is unavailable."""
    try:
        api = library()
        context = api.UCXContext({}, feature_flags=(api.Feature.TAG,))
        description = context.info
    except TransportError as error:
        return str(error)
    except Exception as error:
        return f"UCX cannot be used: {error}"
    names = sorted(set(re.findall(r"flags -- (\S+)/", description)))
    version = ".".join(map(str, api.get_ucx_version()))
    rdma = "" if _RDMA.search(description) else "; no RDMA, of which this build or this machine knows nothing"
    return f"UCX {version} with {', '.join(names)}{rdma}"
