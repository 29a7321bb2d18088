"""A pause of garbage collection leaves the program's own settings of the collector alone."""

from __future__ import annotations

import gc

import pytest

from djinn_core.system.gc_pause import GcPause


@pytest.fixture(autouse=True)
def _own_settings():
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()


@pytest.fixture
def collections():
    """Return a list to which the number of each automatic or explicit collection is appended."""
    began = []

    def note(phase, _):
        if phase == "start":
            began.append(phase)

    gc.callbacks.append(note)
    yield began
    gc.callbacks.remove(note)


def make_garbage(count=5000):
    for _ in range(count):
        one = []
        one.append(one)


def test_disable_and_enable_during_pause_persist():
    pause = GcPause()
    with pause:
        gc.disable()
    assert not gc.isenabled()
    with pause:
        gc.enable()
    assert gc.isenabled()


def test_thresholds_set_during_pause_persist():
    pause = GcPause()
    with pause:
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_thresholds_restored_after_pause_keep_collecting():
    pause, before = GcPause(), gc.get_threshold()
    with pause:
        read = gc.get_threshold()
    gc.set_threshold(*read)
    with pause:
        pass
    assert gc.get_threshold() == before


def test_collection_is_postponed_until_pause_ends(collections):
    gc.enable()
    pause = GcPause()
    with pause, pause:
        make_garbage()
        assert not collections
    make_garbage()
    assert collections


def test_disabled_collector_skips_postponed_collection(collections):
    pause = GcPause()
    gc.disable()
    with pause:
        make_garbage()
        pause.thread.only_waits = True
        pause.catch_up()
    assert not collections
