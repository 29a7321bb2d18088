"""The package's names are available in `djinn` and work. Further tests are in tests/timeline and tests/runtime."""

from __future__ import annotations

import pytest
import torch

import djinn
import djinn.profiler


@pytest.mark.parametrize("name", djinn.profiler.__all__)
def test_profiler_names_are_exported_by_djinn(name):
    found = getattr(djinn.profiler, name)
    assert found.__module__.startswith("djinn_profiler.")
    assert found.__doc__


def test_profile_and_explain_waits_of_block():
    x = torch.ones(3, device="remote_accelerator:0")
    djinn.init()  # a new session compares clocks, which takes a round trip
    with djinn.profile() as prof, djinn.explain_waits() as report:
        assert (x + 1).sum().item() == 6
    assert prof.totals.round_trips == 1
    assert isinstance(prof, djinn.profiler.Timeline)
    assert isinstance(report, djinn.profiler.WaitReport)
    assert [wait.times for wait in report.waits] == [1]
    assert ".item()" in prof.table()


def test_verify_checks_ops_of_block():
    x = torch.ones(3, device="remote_accelerator:0")
    with djinn.verify(bitwise=True) as report:
        assert (x + 1).sum().item() == 6
    assert report.checked >= 2
    with (
        djinn.verify(),
        pytest.raises(djinn.DjinnError, match=r"djinn\.verify\(\) cannot run inside another"),
        djinn.verify(),
    ):
        pass
