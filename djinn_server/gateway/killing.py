"""End a session on request of a client or an operator, with `djinn kill` or on the dashboard."""

from __future__ import annotations

from djinn_core.wire.messages import Killed
from djinn_server.gateway.context import GatewayContext
from djinn_server.hookspecs.authenticators import Denial, Identity
from djinn_server.launch.orders import End


def kill_session(context: GatewayContext, session: str, identity: Identity, peer: str, means: str) -> Killed | Denial:
    """End the session whose name begins with `session`, if the identity may.

    `means`: the way of the request, for the client.
    """
    if identity.monitor:
        return Denial("this token is valid for watching the server only", "monitor")
    shown = context.tenants.statuses(None if identity.sees_all else identity.tenant)
    sessions = [one for executor in shown for one in executor.sessions]
    found = {s.session: s.client for s in sessions if s.session.startswith(session)}
    if len(found) != 1 or not session:
        several = f"{len(found)} sessions begin with" if found else "there is no session that begins with"
        reason = f"{several} {session!r}: `djinn status --json` shows their whole names"
        return Denial(reason, "no_such_session")
    ((name, client),) = found.items()
    facts = {"session": name, "client": client, "tenant": identity.tenant, "key": identity.key}
    context.events.emit("killed", **facts, peer=peer)
    who = "the operator of the server" if identity.sees_all else f"its owner {identity.tenant}"
    for executor in context.tenants.executors():
        executor.send(End(name, f"it was ended by {who}, {means}"))
    return Killed(name, client)
