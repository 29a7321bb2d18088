"""A server over loopback TCP with this process as its client. Both use the same number of PyTorch threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import djinn
from evaluation.served import served

Way = Callable[[str], AbstractContextManager[str]]


@contextmanager
def connected(
    *arguments: str,
    threads: int = 1,
    by: Way = nullcontext,
    environment: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[None]:
    """Run a server over TCP as `remote_accelerator` during the block.

    `by`: context that maps the server's URL to a URL behind a slow link, for example. `environment`: of the server.
    `settings`: settings of this process.
    """
    options = ("--store-gib", "0", *arguments)
    with served(*options, threads=threads, environment=environment) as server, by(server.tcp) as url:
        djinn.shut_down()
        djinn.configure(servers=[url], token=server.token, disable=("local",), **settings)
        try:
            yield
        finally:
            djinn.shut_down()
            djinn.configure()


@contextmanager
def connected_by_file(
    *arguments: str, device: str = "cpu", environment: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """Run a server with this process as its client. Yield its connection file, for commands."""
    with served(*arguments, device=device, environment=environment) as server:
        djinn.shut_down()
        djinn.configure(servers=[server.tcp], token=server.token)
        try:
            yield server.file
        finally:
            djinn.shut_down()
            djinn.configure()
