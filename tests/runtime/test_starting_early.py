"""Executors of a program's own start before something waits for them."""

from __future__ import annotations

import pytest
import torch

import djinn
from djinn.testing import executor_processes
from djinn_core.runtime import client

DEVICE = "remote_accelerator:0"


@pytest.fixture
def unopened():
    """No session is open, and one would have an executor of this process's own; the same afterwards."""
    from configured import configure_anew

    configure_anew(threads=1)
    yield
    configure_anew()


def started():
    """Process ids of the executors that no session has taken."""
    return [executor.process_id for executor in client.context.starting]


@pytest.mark.usefixtures("unopened")
def test_the_first_op_starts_the_executor_that_its_value_is_then_computed_on():
    assert not started()
    x = torch.ones(3, device=DEVICE)
    early = started()
    assert len(early) == 1
    assert not djinn.is_initialized()
    assert x.sum().item() == 3
    assert executor_processes() == tuple(early)
    assert not started()


@pytest.mark.usefixtures("unopened")
@pytest.mark.parametrize("ending", [djinn.shut_down, lambda: djinn.configure(threads=2)])
def test_an_executor_that_no_session_will_take_ends(ending):
    torch.ones(3, device=DEVICE)
    (executor,) = client.context.starting
    ending()
    assert not executor.alive
    assert not started()
    assert torch.ones(2, device=DEVICE).sum().item() == 2


@pytest.mark.usefixtures("unopened")
def test_captures_and_servers_start_none(url_of):
    with djinn.capture():
        torch.ones(3, device=DEVICE).neg()
    assert not started()
    djinn.configure(servers=[url_of("tcp")])
    client.start_early()
    assert not started()


IMPORTING = """\
import multiprocessing, djinn
from djinn_core.runtime import client

def worker():
    assert not client.context.starting, "a worker process starts none"

if __name__ == "__main__":
    (early,) = client.context.starting
    process = multiprocessing.get_context("spawn").Process(target=worker)
    process.start()
    process.join(300)
    assert process.exitcode == 0
    import torch
    assert torch.ones(3, device="remote_accelerator:0").sum().item() == 3
    assert djinn.testing.executor_processes() == (early.process_id,)
    print("started at import")
"""


def test_importing_starts_it_where_a_setting_says_so_and_in_no_worker(python, plain_environment, tmp_path):
    (tmp_path / "program.py").write_text(
        IMPORTING.replace("import multiprocessing, djinn", "import multiprocessing\nimport djinn, djinn.testing")
    )
    done = python.run(tmp_path / "program.py", env=plain_environment | {"DJINN_START_AT_IMPORT": "1"}, cwd=tmp_path)
    assert done.stdout.strip() == "started at import", done.stderr
