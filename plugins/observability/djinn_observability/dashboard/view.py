"""The view: displayed values, computed from a server's status and the previous status. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

Facts = Mapping[str, Any]  # a server, as in `djinn status --json`

OTHER: Final = "other"  # bytes whose kind the client has not reported
KINDS: Final = ("weights", "caches", "optimizer", "gradients", "inputs", "activations", OTHER)
STAGES: Final = ("queue", "decode", "execute", "encode")
# Counters of an executor whose increase is a warning: the name of the event, and its words.
_ALARMS: Final = {
    "quota_refusals": ("session_refused", "refused because a quota is used up"),
    "memory_refusals": ("memory_refused", "allocations for which no room could be made"),
    "op_failures": ("op_failed", "ops failed"),
    "sessions_closed": ("session_ended", "sessions ended by the server"),
    "evictions": ("eviction", "tensors moved out of the device's memory to make room"),
}
LATENCIES: Final = ("answer", "first_token", "token")


@attrs.frozen
class Sample:
    """A status, with its time in seconds of the monotonic clock."""

    at: float
    facts: Facts


def executors_of(facts: Facts) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the executors, each with a key that is unique to its process. A restarted process gets a new key."""
    for executor in facts.get("executors", ()):
        yield f"{executor.get('server', '')}/{executor.get('tenant', '')}/{executor['process']}", executor


def memory_by_kind(executor: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of an executor's sessions by kind of value, without kinds of 0 bytes."""
    by_kind = dict.fromkeys(KINDS, 0)
    for session in executor["sessions"]:
        for kind, nbytes in _kinds(session).items():
            by_kind[kind] += nbytes
    return {kind: nbytes for kind, nbytes in by_kind.items() if nbytes}


def _kinds(session: Mapping[str, Any]) -> dict[str, int]:
    by_kind = {kind: nbytes for kind, nbytes in session.get("kinds", {}).items() if kind in KINDS}
    unknown = session["memory"] - sum(by_kind.values())
    return by_kind | {OTHER: unknown} if unknown > 0 else by_kind


def make_view(before: Sample, now: Sample) -> dict[str, Any]:
    """Return the view of the status `now`. Rates are averages since `before`.

    A rate is 0 if the samples are equal, or if the process began between the samples.
    """
    seconds = now.at - before.at
    earlier = dict(executors_of(before.facts))
    executors = [_executor(key, executor, earlier.get(key), seconds) for key, executor in executors_of(now.facts)]
    return {
        "version": now.facts.get("version", ""),
        "uptime": now.facts.get("uptime", 0.0),
        "executors": executors,
        "events": [_event(executor) for executor in now.facts.get("events", ())],
    }


def shorten(view: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return the view with the `limit` sessions that use the device most. Its `left_out` is the number of others."""
    sessions = [session for executor in view["executors"] for session in executor["sessions"]]
    ids = {
        id(session_id)
        for session_id in sorted(sessions, key=lambda session_id: (-float(session_id["busy"]), session_id["session"]))[
            :limit
        ]
    }
    executors = [
        {**session_id, "sessions": [s for s in session_id["sessions"] if id(s) in ids]}
        for session_id in view["executors"]
    ]
    return {**view, "executors": executors, "left_out": len(sessions) - len(ids)}


def _executor(
    key: str, executor: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float
) -> dict[str, Any]:
    figures = executor.get("figures", {})
    rates = _rates(figures, before.get("figures", {}) if before else None, seconds)
    earlier = {session["session"]: session for session in before["sessions"]} if before else {}
    sessions = [_session(session, earlier.get(session["session"]), seconds) for session in executor["sessions"]]
    device = executor["device"]
    return {
        "key": key,
        "server": executor.get("server", ""),
        "tenant": executor.get("tenant", ""),
        "device": device["id"],
        "name": device.get("name", ""),
        "state": executor["state"],
        "process": executor["process"],
        "restarts": executor.get("restarts", 0),
        "memory": figures.get("memory_bytes", sum(session["memory"] for session in executor["sessions"])),
        "limit": figures.get("memory_limit_bytes", 0),
        "device_memory": device.get("memory", 0),
        "device_free": device.get("memory_free"),
        "pressure": device.get("pressure", 0),
        "shared": figures.get("shared_weight_bytes", 0),
        "spilled": figures.get("spill_bytes", 0),
        "kinds": memory_by_kind(executor),
        "waiting": figures.get("waiting_sessions", 0),
        "longest_wait": figures.get("longest_wait_seconds", 0.0),
        "submissions": rates.get("submissions", 0.0),
        **_serving(executor.get("models", ()), before.get("models", ()) if before else (), seconds),
        "models": _models(executor.get("models", ()), before.get("models", ()) if before else (), seconds),
        "queue": dict(executor.get("queue", {})),
        "log": list(executor.get("log", ())),
        "utilization": device.get("utilization"),
        "temperature": device.get("temperature"),
        "ops": rates.get("ops", 0.0),
        "received": rates.get("received_bytes", 0.0),
        "sent": rates.get("fetched_bytes", 0.0),
        "stages": {name: rates.get(f"{name}_seconds", 0.0) for name in STAGES}
        | {"execute": _share(rates, "device_seconds")},
        "sessions": sessions,
    }


def _session(session: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
    rates = _rates(session, before, seconds, ("steps", "submissions", "seconds"))
    return {
        "session": session["session"],
        "client": session["client"],
        "phase": session.get("phase", ""),
        "steps": rates.get("steps", 0.0),
        "submissions": rates.get("submissions", 0.0),
        **_one_model(session.get("serving", {}), before.get("serving", {}) if before else {}, seconds),
        "busy": _share(rates, "seconds"),
        "memory": session["memory"],
        "values": session["values"],
        "kinds": _kinds(session),
        "age": session["age"],
        "latency": session.get("latency", 0.0),
        "bandwidth": session.get("bandwidth", 0.0),
        "decisions": list(session.get("decisions", ())),
    }


def _one_model(now: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return requests and tokens per second of one model or session, and its latencies as [p50, p99] in seconds."""
    rates = _rates(now, before, seconds, ("requests", "tokens")) if before else {}
    percentiles = {name: [now.get(name, {}).get(key, 0.0) for key in ("p50", "p99")] for name in LATENCIES}
    return {
        "model": now.get("model", ""),
        "requests": rates.get("requests", 0.0),
        "tokens": rates.get("tokens", 0.0),
        **percentiles,
    }


def _models(
    now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], seconds: float
) -> list[dict[str, Any]]:
    earlier = {model["model"]: model for model in before}
    return [_one_model(model, earlier.get(model["model"], {}), seconds) for model in now]


def _serving(now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    models = _models(now, before, seconds)
    return {name: sum(model[name] for model in models) for name in ("requests", "tokens")}


def _rates(
    now: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float, names: Sequence[str] = ()
) -> dict[str, float]:
    if before is None or seconds <= 0:
        return {}
    return {name: max(0.0, now.get(name, 0) - before.get(name, 0)) / seconds for name in names or now}


def _share(rates: Mapping[str, float], name: str) -> float:
    """Return the share of time in which a device computed.

    A submission counts at its end, even if it began before the first status.
    """
    return min(1.0, rates.get(name, 0.0))


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    text = f"{event['name'].replace('_', ' ')}: {event.get('text', '')}".removesuffix(": ")
    return {"seconds": event["seconds"], "name": event["name"], "tenant": event.get("tenant", ""), "text": text}


@attrs.frozen
class Alarm:
    """A fault or a refusal between two statuses.

    `count`: number of occurrences, shown before `text_of_kind`; 0 for a change of state.
    """

    name: str
    tenant: str
    text_of_kind: str
    count: float = 0

    def note(self, seconds: float) -> dict[str, Any]:
        """Return the alarm as an event of the view."""
        text = f"{self.count:g} {self.text_of_kind}" if self.count else self.text_of_kind
        return {"seconds": seconds, "name": self.name, "tenant": self.tenant, "text": text}


def alarms(before: Facts, now: Facts) -> Iterator[Alarm]:
    """Return faults and refusals between two statuses."""
    earlier = dict(executors_of(before))
    for key, executor in executors_of(now):
        tenant, device = executor.get("tenant", ""), executor["device"]["id"]
        earlier_status = earlier.get(key)
        if earlier_status is None:
            continue
        for counter, (name, words) in _ALARMS.items():
            count = executor.get("figures", {}).get(counter, 0) - earlier_status.get("figures", {}).get(counter, 0)
            if count > 0:
                yield Alarm(name, tenant, f"{words} on {device}", count)
        if executor["device"].get("pressure", 0) > earlier_status["device"].get("pressure", 0):
            yield Alarm("memory_short", tenant, f"memory is short on {device}")
        if executor["state"] != earlier_status["state"]:
            yield Alarm("executor_state", tenant, f"the executor on {device} is {executor['state']}")


def merge(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statuses of several servers into one. Servers that do not answer become events."""
    has_several = len(rows) > 1
    answers = [row for row in rows if not row.get("error")]
    missing = [
        {"seconds": 0.0, "name": "no answer", "tenant": "", "text": f"{row['url']}: {row['error']}"}
        for row in rows
        if row.get("error")
    ]
    return {
        "version": answers[0]["version"] if answers else "",
        "uptime": min((row["uptime"] for row in answers), default=0.0),
        "executors": [
            {**executor, "server": row["url"] if has_several else ""}
            for row in answers
            for executor in row["executors"]
        ],
        "events": [*(event for row in answers for event in row.get("events", ())), *missing],
    }
