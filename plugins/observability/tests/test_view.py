"""The view, the history and the screen of `djinn top`, from statuses made up here."""

from __future__ import annotations

import json
from http import HTTPStatus

import pytest
from click.testing import CliRunner
from rich.console import Console

import djinn_observability.dashboard
from djinn.hooks import Identity, WatchedServer
from djinn.testing import CommandConformance, PluginConformance
from djinn_client.runtime.connecting import servers
from djinn_observability.dashboard.history import ALL, FIELDS, MAX_NOTES, MAX_TENANTS, POINTS, POINTS_PER_MEAN, History
from djinn_observability.dashboard.pages import Dashboard
from djinn_observability.dashboard.terminal import make_screen
from djinn_observability.dashboard.view import Sample, make_view, memory_by_kind, merge, shorten
from djinn_observability.dashboard.watcher import Watcher


def session(name="s1", **facts):
    return {"session": name, "client": "alice", "memory": 30, "values": 3, "submissions": 0, "age": 1.0, **facts}


def executor(tenant="alice", process=7, sessions=(), state="ready", **figures):
    device = {"id": "cpu:0", "name": "a CPU", "memory": 1000, "memory_free": 900, "pressure": 0}
    about = {"device": device, "process": process, "state": state, "tenant": tenant, "restarts": 0, "load": 0.0}
    return {**about, "sessions": list(sessions), "figures": figures}


def executor_after(count, model="LlamaForCausalLM"):
    """Return the status of an executor that has served `count` requests of ten tokens each."""
    latency = {"p50": 0.004, "p99": 0.02}
    figures = {"model": model, "requests": count, "tokens": 10 * count, "first_token": latency, "token": latency}
    return {**executor(sessions=[session(serving=figures)]), "models": [figures], "queue": {"0.001": count, "+Inf": 1}}


def status(*executors, events=()):
    return {"version": "26", "uptime": 5.0, "executors": list(executors), "events": list(events)}


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_observability.dashboard


def watch_server(status, end=lambda session, identity: ""):
    return WatchedServer(status, end, lambda shown, asked: Identity("default"))


def commands():
    return {one.name: one for one in djinn_observability.dashboard.djinn_register_commands()}


class TestDashboard(CommandConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_observability.dashboard

    @pytest.fixture
    def command(self):
        return commands()["dashboard"]


class TestTop(TestDashboard):
    @pytest.fixture
    def command(self):
        return commands()["top"]


def test_rates_from_two_statuses():
    before = status(executor(sessions=[session(steps=10, seconds=1.0)], submissions=100, device_seconds=2.0))
    now = status(executor(sessions=[session(steps=30, seconds=2.0)], submissions=140, device_seconds=3.0))
    (seen,) = make_view(Sample(1.0, before), Sample(3.0, now))["executors"]
    assert seen["submissions"] == 20
    assert seen["stages"]["execute"] == 0.5
    assert seen["sessions"][0]["steps"] == 10
    assert seen["sessions"][0]["busy"] == 0.5


def test_device_busy_share_is_at_most_one():
    before = status(executor(sessions=[session(seconds=1.0)], device_seconds=2.0))
    now = status(executor(sessions=[session(seconds=6.0)], device_seconds=7.0))  # a submission of 5 s has ended
    (seen,) = make_view(Sample(1.0, before), Sample(3.0, now))["executors"]
    assert (seen["stages"]["execute"], seen["sessions"][0]["busy"]) == (1.0, 1.0)


def test_request_rates_and_latency_percentiles():
    before, now = status(executor_after(100)), status(executor_after(140))
    (seen,) = make_view(Sample(1.0, before), Sample(3.0, now))["executors"]
    (model,), (one,) = seen["models"], seen["sessions"]
    for found in (seen, model, one):
        assert (found["requests"], found["tokens"]) == (20, 200)
    for found in (model, one):
        assert (found["model"], found["first_token"], found["answer"]) == ("LlamaForCausalLM", [0.004, 0.02], [0, 0])
    assert seen["queue"] == {"0.001": 140, "+Inf": 1}


def test_model_without_earlier_status_has_no_rates():
    (seen,) = make_view(Sample(1.0, status(executor_after(9, "BertModel"))), Sample(2.0, status(executor_after(5))))[
        "executors"
    ]
    assert seen["models"][0]["requests"] == 0


def test_single_view_shows_rates(monkeypatch):
    """One status has no rates, so `djinn top` requests an earlier one first."""
    asked = []
    monkeypatch.setattr(
        servers, "read_status", lambda *_: asked.append(1) or [{"url": "x", "error": None, **statuses[len(asked) - 1]}]
    )
    statuses = [status(executor_after(count)) for count in (100, 700)]
    done = CliRunner().invoke(commands()["top"], ["--times", "1"])
    assert done.exit_code == 0, done.output
    assert len(asked) == 2
    assert "requests/s" in done.output
    (row,) = [line for line in done.output.splitlines() if line.startswith("cpu:0")]
    assert " 0.0" not in row


def test_restarted_executor_has_no_rates():
    before, now = status(executor(process=7, submissions=100)), status(executor(process=8, submissions=5))
    assert make_view(Sample(1.0, before), Sample(2.0, now))["executors"][0]["submissions"] == 0


def test_memory_by_kind_leaves_out_kinds_that_are_unknown():
    one = executor(
        sessions=[session(kinds={"weights": 20, "<b>": 5}), session("s2", kinds={"weights": 5, "caches": 1})]
    )
    assert memory_by_kind(one) == {"weights": 25, "caches": 1, "other": 34}


def test_unreachable_servers_are_events():
    merged = merge([{"url": "tcp://a", "error": "no"}, {"url": "tcp://b", "error": None, **status(executor())}])
    assert merged["executors"][0]["server"] == "tcp://b"
    assert merged["events"][0]["text"] == "tcp://a: no"


def test_busiest_sessions_are_shown():
    before = status(executor(sessions=[session(f"s{n}", seconds=0.0) for n in range(1000)]))
    now = status(executor(sessions=[session(f"s{n}", seconds=n / 1000) for n in range(1000)]))
    short = shorten(make_view(Sample(0.0, before), Sample(1.0, now)), 200)
    assert short["left_out"] == 800
    assert {one["session"] for one in short["executors"][0]["sessions"]} == {f"s{n}" for n in range(800, 1000)}


def test_history_is_bounded_and_by_tenant():
    history = History()
    for number in range(POINTS + 10):
        sessions = [session(kinds={"weights": number})]
        history.add(Sample(float(number), status(executor("alice", sessions=sessions), executor("bob", 8))), number)
    count, points, day = history.points(ALL)
    assert (count, len(points)) == (POINTS + 10, POINTS)
    assert len(day) == count // POINTS_PER_MEAN
    assert day[-1][FIELDS.index("weights")] == count // POINTS_PER_MEAN * POINTS_PER_MEAN - (POINTS_PER_MEAN + 1) / 2
    assert [len(new) for new in history.points(ALL, count - POINTS_PER_MEAN)[1:]] == [POINTS_PER_MEAN, 1]
    assert points[-1][FIELDS.index("weights")] == POINTS + 9
    assert len(history.points("alice", count - 3)[1]) == 3
    assert history.points("bob")[1][-1][FIELDS.index("weights")] == 0
    assert history.points("carol")[1] == []
    for number in range(POINTS_PER_MEAN):
        history.add(Sample(1.0, status(executor("bob"))), count + number)
    (_, news, days), (_, later, _) = history.points("alice", count), history.points("bob", count)
    assert (news, len(days), len(later)) == (
        [],
        1,
        POINTS_PER_MEAN,
    )  # alice's executors are gone, and an earlier day's point ends
    for number in range(2 * MAX_TENANTS):
        history.add(Sample(1.0, status(executor(f"tenant{number}"))), number)
    assert len(history._points) <= MAX_TENANTS


def test_faults_are_shown_to_their_tenant_only():
    history = History()
    history.add(Sample(0.0, status(executor("alice"), executor("bob", 8))), 0.0)
    history.add(Sample(1.0, status(executor("alice", quota_refusals=2), executor("bob", 8, state="restarting"))), 1.0)
    (refused,) = history.notes("alice")
    assert (refused["name"], refused["text"]) == ("session_refused", "2 refused because a quota is used up on cpu:0")
    assert [one["text"] for one in history.notes("bob")] == ["the executor on cpu:0 is restarting"]
    assert len(history.notes(ALL)) == 2
    for number in range(2 * MAX_NOTES):
        history.add(Sample(1.0, status(executor("alice", quota_refusals=number + 3))), 100.0 * number)
    assert len(history.notes("alice")) == MAX_NOTES


def test_equal_alarms_are_merged():
    history = History()
    for number in range(12):
        history.add(Sample(1.0, status(executor(evictions=10 * number))), 10.0 * number)
    first, second = [one["text"] for one in history.notes(ALL)]
    assert first.startswith("60 tensors moved")
    assert second.startswith("50 tensors moved")


def test_event_feed_is_limited_to_tenant():
    asked = []

    def answer(tenant):
        asked.append(tenant)
        both = [executor("alice", sessions=[session()]), executor("bob", 8, [session("s2", client="bob's")])]
        return status(*(one for one in both if tenant in {None, one["tenant"]}))

    pages = Dashboard(watch_server(answer))
    try:
        feed = pages.answer("/feed", Identity("alice"))
        said = [feed.next(), feed.next()]
        everything = json.loads(pages.answer("/feed", Identity("alice", monitor=True)).next())
    finally:
        pages.close()
    assert b"bob" not in b"".join(said)
    assert json.loads(said[0])["fields"] == list(FIELDS)
    assert [one["tenant"] for one in everything["live"]["executors"]] == ["alice", "bob"]


def test_session_kill_needs_permission():
    asked = []

    def end(session, identity):
        asked.append((session, identity.tenant))
        return "" if identity.tenant == "alice" else "there is no such session"

    pages = Dashboard(watch_server(lambda _: status(), end))
    try:
        answers = [pages.act("/end/s1", Identity(name)).status for name in ("alice", "bob")]
        other = pages.act("/feed", Identity("alice")).status
        told = [
            json.loads(pages.answer("/feed", who).next())["may_end"]
            for who in (Identity("alice"), Identity("alice", monitor=True))
        ]
    finally:
        pages.close()
    assert answers == [HTTPStatus.OK, HTTPStatus.FORBIDDEN]
    assert other == HTTPStatus.NOT_FOUND
    assert asked == [("s1", "alice"), ("s1", "bob")]
    assert told == [True, False]


def test_viewers_share_status_request():
    asked = []
    watcher = Watcher(watch_server(lambda tenant: asked.append(tenant) or status()), seconds=1000.0)
    try:
        for _ in range(10):
            watcher.view("alice")
        assert asked.count("alice") == 1
    finally:
        watcher.end()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_omitted_columns_are_named(width):
    busy = session(client="alice@laptop process 12345", phase="llm_decode", kinds={"weights": 3 << 20}, latency=0.0123)
    one = executor(sessions=[busy], waiting_sessions=1, longest_wait_seconds=0.012, memory_limit_bytes=24 << 30)
    console = Console(width=width)
    with console.capture() as captured:
        console.print(make_screen(make_view(*[Sample(1.0, status(one))] * 2), [], FIELDS, width))
    lines = captured.get().splitlines()
    (head,) = [line.split() for line in lines if line.startswith("executor")]
    (row,) = [line for line in lines if line.startswith("cpu:0")]
    assert "busy" in head
    assert "0%" in row
    assert "…" not in row
    left_out = " ".join(lines).partition("no room for")[2].partition("client")[0]
    assert ("waiting" in left_out) != ("waiting" in head)
    assert ("by kind" in left_out) == (width < 120)


def test_rates_and_latencies_fit_80_columns():
    before, now = status(executor_after(100)), status(executor_after(140))
    console = Console(width=80)
    with console.capture() as captured:
        console.print(make_screen(make_view(Sample(1.0, before), Sample(2.0, now)), [], FIELDS, 80))
    (head,) = [line for line in captured.get().splitlines() if line.startswith("client")]
    for column in ("req/s", "tok/s", "first token", "token", "busy", "memory"):
        assert column in head
    assert "4.0/20.0 ms" in captured.get()


@pytest.mark.parametrize("width", [80, 160])
def test_screen_shows_markup_literally(width):
    hostile = session(client="[red]x[/red]", phase="llm_decode", kinds={"weights": 30})
    event = {"seconds": 1.0, "name": "refused", "tenant": "alice", "text": "why: [b]token"}
    view = make_view(*[Sample(1.0, status(executor(sessions=[hostile]), events=[event]))] * 2)
    console = Console(width=width)
    with console.capture() as captured:
        console.print(make_screen(view, [], FIELDS, width))
    assert "[red]x[/red]" in captured.get()
    assert "why: [b]token" in captured.get()
