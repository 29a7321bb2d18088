"""Wire protocol of both ends: a two-way stream of frames over HTTP requests.

A client opens a channel and gets its secret id. The id is in a header of each request, because URLs are logged. The client
sends the bytes of its frames as bodies of numbered `send` requests. It fetches the server's bytes by `receive` requests, one
of which always waits at the server. Every request is a POST, because proxies repeat and cache other requests.
"""

from __future__ import annotations

from typing import Final

OPEN: Final = "open"
SEND: Final = "send"
RECEIVE: Final = "receive"
CLOSE: Final = "close"
# Path; a prefix before it belongs to a proxy.
PATH: Final = "/djinn/v1/"

CHANNEL: Final = "Djinn-Channel"
# Number of a `send` among the sends of its channel, or of a `receive` among those that were answered with bytes; from 0.
SEQUENCE: Final = "Djinn-Sequence"
# The protocol that an `open` may ask for in place of requests: frames in both directions, as over TCP.
UPGRADE: Final = "djinn/1"
# Browsers do not send this type across origins without asking first.
CONTENT_TYPE: Final = "application/octet-stream"

# Maximum bytes of a request's body: nginx's default limit.
PIECE_BYTES: Final = 1 << 20
# Concurrent sends: with one, a distant server would cost a round trip each.
PARALLEL_SENDS: Final = 4
# Seconds that a `receive` waits at the server; proxies give up after 60 s.
WAIT_SECONDS: Final = 20.0
# Seconds without a request after which a channel is dropped.
EXPIRY_SECONDS: Final = 120.0
# Seconds that the last frames of a closed channel can be fetched.
LINGER_SECONDS: Final = 10.0
# Idle seconds after which a connection is not reused, because a proxy may be about to close it.
IDLE_SECONDS: Final = 30.0
