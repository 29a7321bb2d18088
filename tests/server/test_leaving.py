"""Sessions that end in any way leave nothing: the short form of `python -m evaluation load`'s row of sessions."""

from __future__ import annotations

import signal

from evaluation.load import leaving


def test_ended_sessions_leave_nothing(own_server, tmp_path, monkeypatch, wait_for, exists):
    (tmp_path / "sockets").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "sockets"))
    folders = {"journals": tmp_path / "state" / "journals", "weights": tmp_path / "weights"}
    options = [f"--state-dir={tmp_path / 'state'}", f"--store={folders['weights']}", "--lease-seconds", "0.5"]
    server = own_server("--threads", "1", "--drain-seconds", "1", *options)
    urls, token = {scheme: server.url(scheme) for scheme in ("tcp", "http")}, server.token
    processes = (server.process.pid, leaving.executor_of(urls["tcp"], token)[0])
    leaving.drop(len(leaving.ENDS), urls, token)
    before, there = leaving.settled(processes, urls["tcp"], token), leaving.files_below(tmp_path)
    leaving.drop(2 * len(leaving.ENDS), urls, token)
    after = leaving.settled(processes, urls["tcp"], token, before)
    assert all(new.fits(old) for new, old in zip(after, before, strict=True)), (before, after)
    assert leaving.files_below(tmp_path) <= there
    assert not list(folders["journals"].iterdir())
    assert leaving.executor_of(urls["tcp"], token) == (processes[1], 0)
    left = leaving.Peer(urls, token, "tcp")
    leaving.unwanted_offer(left)
    leaving.half_an_upload(left)
    assert len(list(folders["journals"].iterdir())) > 2
    server.stop(signal.SIGKILL)
    wait_for(lambda: not exists(processes[1]), "the end of the executor of a server that was killed")
    assert not list(folders["journals"].iterdir())
    assert not list((tmp_path / "sockets").iterdir())
    left.close()
