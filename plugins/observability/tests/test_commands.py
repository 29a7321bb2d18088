"""`djinn top` against a server, and the server of pages that `djinn dashboard` starts."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request

import pytest
from click.testing import CliRunner

from djinn.hooks import OperationsAddress, WatchedServer
from djinn.testing import OperationsServerConformance
from djinn_client.runtime.connecting.servers import read_status
from djinn_observability.dashboard.operations import DjinnOperations, identify_by
from djinn_observability.dashboard.top_command import top

CODE = "a-code-of-this-test"
STATUS = {"version": "26", "uptime": 1.0, "executors": [], "events": []}


def test_top_shows_server_requested_times(serving, monkeypatch):
    (url,) = [url for url in serving.urls if url.startswith("tcp:")]
    monkeypatch.setenv("DJINN_TOKEN", serving.token)
    shown = CliRunner().invoke(top, ["--server", url, "--times", "2", "--seconds", "0.5"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("executor tenant") == 2, "a heading each time; events also name executors"
    assert "cpu:0" in shown.output
    (row,) = read_status([url])
    assert row["executors"][0]["figures"]["resident_memory_bytes"] > 0


def test_top_names_unreachable_server():
    environment = {"DJINN_TOKEN": "a-token-of-sixteen-or-more"}
    shown = CliRunner().invoke(top, ["--server", "tcp://127.0.0.1:9", "--times", "1"], env=environment)
    assert "no answer: tcp://127.0.0.1:9" in shown.output


@pytest.fixture(scope="module")
def dashboard_url():
    end = lambda session, _: "" if session == "s1" else "there is no such session"
    watched = WatchedServer(lambda _: STATUS, end, identify_by(CODE))
    with contextlib.closing(DjinnOperations()) as operations:
        yield operations.start(watched, OperationsAddress("127.0.0.1")) + "/dashboard"


class TestOperations(OperationsServerConformance):
    @pytest.fixture
    def operations(self):
        return DjinnOperations()


def get(url, code=None, **headers):
    shown = {} if code is None else {"Authorization": f"Bearer {code}"}
    return urllib.request.urlopen(urllib.request.Request(url, headers=shown | headers), timeout=60)


def test_dashboard_page_is_public_and_data_needs_code(dashboard_url):
    with get(dashboard_url) as page:
        assert b"<title>Djinn</title>" in page.read()
    with get(f"{dashboard_url}/feed", CODE) as feed:
        assert json.loads(feed.readline().removeprefix(b"data: "))["live"]["version"] == "26"


@pytest.mark.parametrize(
    ("path", "code", "headers", "status"),
    [
        ("/feed", None, {}, 401),
        ("/feed", "another", {}, 401),
        ("/feed", CODE, {"Origin": "https://evil.example"}, 403),
        ("/feed", CODE, {"Host": "evil.example"}, 421),
        ("/none", CODE, {}, 404),
    ],
)
def test_other_requests_are_refused(dashboard_url, path, code, headers, status):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(dashboard_url + path, code, **headers)
    with caught.value as answer:
        assert answer.code == status
        assert status != 401 or b"the page is at /dashboard" in answer.read()


@pytest.mark.parametrize(
    ("path", "code", "headers", "status"),
    [
        ("/end/s1", CODE, {}, 200),
        ("/end/s2", CODE, {}, 403),
        ("/end/s1", None, {}, 401),
        ("/end/s1", CODE, {"Origin": "https://evil.example"}, 403),
        ("/feed", CODE, {}, 404),
    ],
)
def test_session_kill_needs_post_and_code(dashboard_url, path, code, headers, status):
    shown = {} if code is None else {"Authorization": f"Bearer {code}"}
    request = urllib.request.Request(dashboard_url + path, headers=shown | headers, method="POST")
    with pytest.raises(urllib.error.HTTPError) if status != 200 else contextlib.nullcontext() as caught:
        urllib.request.urlopen(request, timeout=60).close()
    if caught is not None:
        with caught.value as answer:
            assert answer.code == status
