"""Functions of `djinn.testing` that tell about the open session and break it."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn.testing import (
    break_connection,
    executor_figures,
    executor_processes,
    kill_executor,
    open_connections,
    open_session,
    plans_made,
    session_name,
    unsent_instructions,
)


@pytest.mark.usefixtures("plans_all")
def test_session_counts_recorded_held_and_planned_values(embedded) -> None:
    djinn.synchronize()
    djinn.reset_stats()
    before = executor_figures()["values"]
    assert (unsent_instructions(), plans_made()) == (0, 0)
    tensors = [torch.full((5, n + 3), 2.5, device=embedded).erfinv() for n in range(3)]
    assert unsent_instructions() >= len(tensors)
    assert tensors[0].cpu().shape == (5, 3)
    djinn.synchronize()
    assert unsent_instructions() == 0
    assert plans_made() == djinn.stats()["plans_made"] > 0
    assert executor_figures()["values"] >= before + len(tensors)


def test_session_has_name_and_refuses_missing_attributes(embedded) -> None:
    assert not open_session().lost
    assert session_name()
    with pytest.raises(djinn.DjinnError, match="no connection 7; there are 1"):
        break_connection(7)
    djinn.shut_down()
    assert open_connections() == ()
    with pytest.raises(djinn.DjinnError, match="no session is open"):
        open_session()
    djinn.init()


def test_broken_connection_is_resumed(connect, url_of) -> None:
    with connect(url_of("tcp")):
        total, name = torch.zeros(3, device="remote_accelerator:0"), session_name()
        for _ in range(3):
            total += 1
            break_connection()
            assert total.tolist()
        assert total.tolist() == [3.0] * 3
        assert open_connections()[0].connection.resumed >= 1
        assert session_name() == name


def test_kill_executor_ends_its_process(embedded) -> None:
    value = torch.ones(3, device=embedded).cpu()
    (before,) = executor_processes()
    kill_executor()
    with pytest.raises(djinn.errors.SessionLost):
        while True:
            (torch.ones(3, device=embedded) + value.to(embedded)).tolist()
            if executor_processes() != (before,):
                raise djinn.errors.SessionLost("replaced")
    djinn.init()
    assert executor_processes() != (before,)
