"""An executor that is wrong in known ways, see `wrong_executor.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import started


@pytest.fixture(scope="session")
def wrong(python, plain_environment, tmp_path_factory):
    """A server whose executor has wrong kernels; its connection file."""
    folder = tmp_path_factory.mktemp("wrong")
    command = [Path(__file__).with_name("wrong_executor.py"), "serve", folder / "connection.json"]
    server = started(python.start, command, folder, plain_environment)
    yield server.file
    server.stop()


@pytest.fixture
def on_wrong_executor(wrong):
    """The device, on that executor; gives its name."""
    from configured import configured

    with configured(connection_file=wrong):
        yield "remote_accelerator:0"
