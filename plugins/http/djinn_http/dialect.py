"""Wire protocol of both ends: a two-way stream of frames in HTTP requests.

A client opens a channel and gets its unguessable id, which travels in a header, never in a URL that would be logged.
It sends the bytes of its frames as the bodies of numbered `send` requests, and fetches those of the server with
`receive` requests, of which one always waits at the server. Every request is a POST: proxies repeat and cache others.
"""

from __future__ import annotations

from typing import Final

OPEN: Final = "open"
SEND: Final = "send"
RECEIVE: Final = "receive"
CLOSE: Final = "close"
# What comes before it is a proxy's business.
PATH: Final = "/djinn/v1/"

CHANNEL: Final = "Djinn-Channel"
# Number of a `send` among the sends of its channel, or of a `receive` among those that were answered with bytes; from 0.
SEQUENCE: Final = "Djinn-Sequence"
# The protocol that an `open` may ask for in place of requests: frames in both directions, as over TCP.
UPGRADE: Final = "djinn/1"
# Browsers do not send this type across origins without asking first.
CONTENT_TYPE: Final = "application/octet-stream"

# The longest body of a request: what nginx lets pass unless it is told otherwise.
PIECE_BYTES: Final = 1 << 20
# Sends under way at once: a long way to the server would otherwise cost a round trip for each.
PARALLEL_SENDS: Final = 4
# How long a `receive` waits at the server; proxies give up after 60 s.
WAIT_SECONDS: Final = 20.0
# A channel that no request has asked for in this long is given up.
EXPIRY_SECONDS: Final = 120.0
# How long the last frames of a closed channel wait to be fetched.
LINGER_SECONDS: Final = 10.0
# A connection that was idle for longer is not used again: something in between may be about to close it.
IDLE_SECONDS: Final = 30.0
