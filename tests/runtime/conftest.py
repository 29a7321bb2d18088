"""An executor that is wrong in known ways, see `wrong_executor.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import started_server


@pytest.fixture(scope="session")
def wrong_server_file(python, plain_environment, tmp_path_factory):
    """Return the connection file of a server whose executor has wrong kernels."""
    folder = tmp_path_factory.mktemp("wrong")
    command = [Path(__file__).with_name("wrong_executor.py"), "serve", folder / "connection.json"]
    server = started_server(python.start, command, folder, plain_environment)
    yield server.file
    server.stop()


@pytest.fixture
def on_wrong_executor(wrong_server_file):
    """Connect to the executor with wrong kernels. Yield the device's name."""
    from configured import configured

    with configured(connection_file=wrong_server_file):
        yield "remote_accelerator:0"
