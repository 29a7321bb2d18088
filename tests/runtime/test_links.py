"""Links between this process and the device: measured in ordinary submissions, once in a session."""

from __future__ import annotations

import djinn
from djinn_client.runtime import client
from djinn_pool import link_measurement


def test_links_are_measured_once(embedded):
    before = djinn.stats()
    found = djinn.topology()
    after = djinn.stats()
    assert after["bytes_uploaded"] - before["bytes_uploaded"] in {
        0,
        8 << 20,
    }  # none where another test has asked already
    (device,) = found.devices
    assert device.id == client.device().id
    assert device.memory > 0
    assert device.queue >= 0
    there, back = found.link("client", device.id), found.link(device.id, "client")
    for link in (there, back):
        assert 0 < link.latency < 1
        assert 1e6 < link.bandwidth < 1e12
        assert link.transfer_seconds(1 << 30) > link.transfer_seconds(1 << 10) > link.latency
    assert djinn.topology() == found
    assert djinn.stats()["bytes_uploaded"] == after["bytes_uploaded"]


def test_new_session_is_measured_again(embedded):
    djinn.topology()
    djinn.shut_down()
    before = djinn.stats()["bytes_uploaded"]
    djinn.topology()
    assert djinn.stats()["bytes_uploaded"] - before == 8 << 20


def test_queue_time_is_averaged_over_submissions(embedded, monkeypatch):
    monkeypatch.setattr(client.context.stats, "server_queue_us", 4_000_000)
    monkeypatch.setattr(client.context.stats, "submissions", 8)
    assert link_measurement.queue_seconds() == 0.5
