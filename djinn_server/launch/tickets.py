"""Issue and check one-time tickets, with which a client connects to an executor.

A ticket is a grant (client, expiry time, nonce), signed with a key that only the executor and its parent know. So the
parent issues tickets without a call to the executor, which may be busy.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import threading
import time
from typing import Final

import attrs
import msgspec

from djinn_server.hookspecs.quotas import Quota

KEY_BYTES = 32
CLIENT_LENGTH = 128  # maximum characters of a client's name
TICKET_SECONDS: Final = 60.0  # lifetime: a client may wait for the timeouts of several addresses


class Badge(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Identity of an admitted client: its tenant, the id of its token, and the quota of the tenant."""

    tenant: str = ""
    token: str = ""
    quota: Quota = Quota()


NO_TENANT: Final = Badge()  # for example of the program that started the executor


class Grant(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Content of a ticket.

    `expires`: time on the machine's monotonic clock in seconds, which is the same in all processes of the machine.
    """

    client: str
    expires: float
    nonce: str
    badge: Badge = NO_TENANT


# Created at import: msgspec crashes if two threads let it inspect a class for the first time at the same time.
_grants: msgspec.json.Decoder[Grant] = msgspec.json.Decoder(Grant)


def new_key() -> bytes:
    """Return a random signing key."""
    return secrets.token_bytes(KEY_BYTES)


def issue_ticket(key: bytes, client: str, lifetime: float = TICKET_SECONDS, badge: Badge = NO_TENANT) -> str:
    """Return a ticket that is valid once, within `lifetime` seconds. `client`: name of the client, for messages."""
    grant = Grant(_printable_name(client), time.monotonic() + lifetime, secrets.token_urlsafe(12), badge)
    statement = msgspec.json.encode(grant)
    return base64.urlsafe_b64encode(_sign(key, statement) + statement).decode("ascii")


@attrs.define
class TicketChecker:
    """Check tickets, and accept each valid ticket once. Methods may be called from several threads."""

    _key: bytes = attrs.field(repr=False)
    _used: dict[str, float] = attrs.field(factory=dict, repr=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, repr=False)

    def redeem(self, ticket: str) -> Grant | None:
        """Return the grant of a valid ticket, or None if the ticket is forged, expired or used.

        The signature is compared in constant time.
        """
        grant = _verify(self._key, ticket)
        now = time.monotonic()
        if grant is None or grant.expires < now:
            return None
        with self._lock:
            self._used = {nonce: expires for nonce, expires in self._used.items() if expires >= now}
            if grant.nonce in self._used:
                return None
            self._used[grant.nonce] = grant.expires
        return grant


def _printable_name(client: str) -> str:
    """Return the name with unprintable characters replaced, truncated so that the ticket fits into a message."""
    text = client[:CLIENT_LENGTH].encode("ascii", "replace").decode("ascii")
    return "".join(character if character.isprintable() else "?" for character in text)


def _sign(key: bytes, statement: bytes) -> bytes:
    return hmac.digest(key, statement, hashlib.sha256)


def _verify(key: bytes, ticket: str) -> Grant | None:
    try:
        raw = base64.urlsafe_b64decode(ticket.encode("ascii"))
    except (UnicodeEncodeError, binascii.Error):
        raw = b""
    size = hashlib.sha256().digest_size
    signature, statement = raw[:size], raw[size:]
    if not hmac.compare_digest(signature, _sign(key, statement)):
        return None
    try:
        return _grants.decode(statement)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # signed by a parent of another version
        return None
