"""This process as the client of a server of its own over loopback TCP, with one thread as the local reference."""

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
    """`remote_accelerator` is a server of its own over TCP, as long as the block lasts.

    `by` gives, for the server's URL, one that leads there by another way, such as a slow link. `environment` is the server's,
    `settings` are this process's.
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
    """A server, and this process as its client, as long as the block lasts; gives a connection file of it, for commands."""
    with served(*arguments, device=device, environment=environment) as server:
        djinn.shut_down()
        djinn.configure(servers=[server.tcp], token=server.token)
        try:
            yield server.file
        finally:
            djinn.shut_down()
            djinn.configure()
