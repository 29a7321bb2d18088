"""Logs stay out of the user's way until asked for, and never hold a secret."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from djinn_core import logs
from djinn_core.errors import ConfigurationError


@pytest.fixture(autouse=True)
def reset_logs():
    logs.hide()
    yield
    logs.hide()


@pytest.fixture
def log():
    return logs.get_logger("djinn.runtime")


def shown_lines(level="info", **environ):
    stream = io.StringIO()
    logs.show(level, stream, environ)
    return stream


def test_library_adds_no_log_handler_by_default(log, caplog):
    log.warning("it happened", size=3)
    assert logging.getLogger("djinn").handlers == []
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("djinn.runtime", "it happened size=3")
    assert record.djinn == {"event": "it happened", "size": 3}


def test_log_shows_warnings_only_by_default():
    script = "from djinn_core.logs import get_logger; l = get_logger('djinn.x'); l.info('quiet'); l.warning('loud', pct='5%')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "loud pct='5%'\n")


def test_formatter_is_created_for_first_message(log, monkeypatch):
    made, make = [], logs._formatter
    monkeypatch.setattr(logs, "_formatter", lambda *given: made.append(given) or make(*given))
    stream = shown_lines("warning")
    log.info("not shown")
    assert made == []
    log.warning("shown")
    log.warning("shown again")
    assert (made, stream.getvalue()) == ([("plain", False)], "shown\nshown again\n")


def test_console_log_format(log):
    stream = shown_lines()
    log.info("connected", url="tcp://host:1", seconds=0.5)
    line = stream.getvalue()
    assert "connected" in line
    assert "url=tcp://host:1" in line
    assert "djinn.runtime" in line
    assert "\x1b" not in line


def test_json_log_format(log):
    stream = shown_lines(DJINN_LOG_FORMAT="json")
    log.info("connected", seconds=0.5)
    try:
        raise OSError("broken, token=s3cr3t")
    except OSError:
        log.warning("lost", exc_info=True)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert {k: first[k] for k in ("event", "logger", "level", "seconds")} == {
        "event": "connected",
        "logger": "djinn.runtime",
        "level": "info",
        "seconds": 0.5,
    }
    assert "OSError: broken, token=[hidden]" in second["exception"]


def test_enabling_log_twice_prints_lines_once(log):
    shown_lines()
    stream = shown_lines()
    log.info("once")
    assert stream.getvalue().count("once") == 1
    assert len(logging.getLogger("djinn").handlers) == 1


@pytest.mark.parametrize("style", ["json", "console"])
def test_log_redacts_secrets(log, style):
    stream = shown_lines(DJINN_LOG_FORMAT=style)
    log.info(
        "hello bearer s3cr3t",
        token="s3cr3t",
        nested={"ticket": "s3cr3t", "deep": [{"password": "s3cr3t"}]},
        url="tcp://me:s3cr3t@host/?token=s3cr3t&x=1",
        error=ValueError("token=s3cr3t"),
        body=b"s3cr3t",
    )
    assert "s3cr3t" not in stream.getvalue()
    assert "x=1" in stream.getvalue()


@pytest.mark.parametrize(
    "query",
    [
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=s3cr3t%2F20261129&X-Amz-Security-Token=s3cr3t%2B&x=1&X-Amz-Signature=s3cr3t",
        "AWSAccessKeyId=s3cr3t&Signature=s3cr3t%3D&x=1&Expires=1764450000",
        "X-Goog-Algorithm=GOOG4-RSA-SHA256&X-Goog-Credential=s3cr3t%40x.iam&x=1&X-Goog-Signature=s3cr3t",
        "GoogleAccessId=s3cr3t@x.iam&Expires=1764450000&Signature=s3cr3t%2B&x=1",
        "sv=2024-11-04&se=2026-11-30&sr=b&sp=r&x=1&sig=s3cr3t%3D",
    ],
    ids=["s3-v4", "s3-v2", "gcs-v4", "gcs-v2", "azure"],
)
def test_log_redacts_url_signatures(log, query):
    stream, recent = shown_lines(), logs.RecentLines()
    logging.getLogger("djinn").addHandler(recent)
    try:
        url = f"https://bucket.example/weights?{query}"
        log.info("reading", url=url, error=OSError(f"{url}: 403"))
        logging.getLogger("djinn.runtime").info("reading %s", url)  # a logger of the standard library
    finally:
        logging.getLogger("djinn").removeHandler(recent)
    for text in (stream.getvalue(), *recent.lines()):
        assert "s3cr3t" not in text
        assert "weights?" in text
    assert "x=1" in stream.getvalue()
    assert len(recent.lines()) == 2


def test_debug_log_of_some_parts(log):
    stream = shown_lines("warning")
    logs.set_debug_level("runtime,djinn.pool")
    log.debug("seen")
    logs.get_logger("djinn.server").debug("not seen")
    assert "seen" in stream.getvalue()
    assert "not seen" not in stream.getvalue()
    logs.set_debug_level("off")
    log.info("over")
    log.warning("as before")
    assert "over" not in stream.getvalue()
    assert "as before" in stream.getvalue()


def test_debug_log_of_all_parts_can_be_reset(log, capsys):
    logs.set_debug_level("all")
    log.debug("one")
    logs.set_debug_level("")
    log.debug("two")
    assert "one" in capsys.readouterr().err
    assert logging.getLogger("djinn").handlers == []
    assert logging.getLogger("djinn").propagate


def test_log_parts_match_loggers():
    root = Path(__file__).parents[2]
    sources = "".join(
        path.read_text()
        for package in ("core", "client", "server")
        for path in (root / f"djinn_{package}").rglob("*.py")
    )
    assert set(logs.PARTS) == set(re.findall(r'get_logger\("djinn\.(\w+)', sources))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: logs.set_debug_level("runtme"), "did you mean 'runtime'"),
        (lambda: logs.set_debug_level("runtime,qqq"), "use all, off or some of"),
        (lambda: logs.show("loud"), "no log level 'loud'"),
        (lambda: logs.show(environ={"DJINN_LOG_FORMAT": "xml"}), "use json or console"),
    ],
)
def test_invalid_log_settings_raise(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_log_redacts_tokens_anywhere():
    from djinn_server.launch.token_table import TokenTable, create

    _, row, token = create(TokenTable(), "alice", 0.0)
    shown_lines = str(logs.redact(None, "", {"event": f"a client came with {token}", "key": row.id}))
    assert token not in shown_lines
    assert row.id in shown_lines


def test_warning_level_format_equals_default(log):
    stream = shown_lines("warning")
    log.info("quiet")
    log.warning("loud", pct="5%", token="hunter2")
    assert stream.getvalue() == f"loud pct='5%' token={logs.HIDDEN!r}\n"
    logs.set_debug_level("runtime")
    log.debug("in detail")
    assert "[debug" in stream.getvalue().splitlines()[-1], (
        "a log with levels and times, where more than warnings is shown"
    )
    logs.set_debug_level("off")
    log.warning("loud again")
    assert stream.getvalue().splitlines()[-1] == "loud again"
