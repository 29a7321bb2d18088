"""An open session: its connection, addresses and executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from djinn_client.runtime.connecting.client_channel import ClientChannel
from djinn_core.wire.messages import Attached

if TYPE_CHECKING:
    from djinn_core.registry.embedded_executors import EmbeddedExecutor


class OpenSession(msgspec.Struct, frozen=True):
    """A session that has begun.

    Attributes:
        connection: where its frames go.
        attached: what the executor said.
        url: the address that was reached; `inline` where the executor is a thread of this process.
        fallbacks: what was tried before, each with the reason why it was given up.
        executor: the process that was started for this session alone, to be closed after it; None if a server runs it.
        addresses: where its server listens, as far as that is known.
        server: what messages call it: the address that is configured.
    """

    connection: ClientChannel
    attached: Attached
    url: str
    fallbacks: tuple[str, ...] = ()
    executor: EmbeddedExecutor | None = None
    addresses: tuple[str, ...] = ()
    server: str = "this program's own executor"

    @property
    def now(self) -> Attached:
        """`Attached` reply of the executor that has the session now; after a failover, that of the other server."""
        return self.connection.successor or self.attached

    @property
    def compressions(self) -> tuple[str, ...]:
        """Compressions for uploads: none on this machine, where expanding takes longer than copying."""
        return () if self.url.startswith(("unix:", "inline")) else self.attached.compressions

    @property
    def process(self) -> int:
        """Process number of the executor, on its machine."""
        return self.executor.process_id if self.executor is not None else self.now.process

    def close(self) -> None:
        """End the connection, and the process that was started for it."""
        self.connection.close()
        if self.executor is not None:
            self.executor.close(0.0)
