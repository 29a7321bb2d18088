from __future__ import annotations

from pathlib import Path

import pytest
from servers import SECONDS, fresh_python, start_executor, start_server, wait_for

from djinn_core.hookspecs.transports import Connection, Frame, Limits
from djinn_core.protocol.addresses import transport_for
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import Registry, load_registry
from djinn_core.registry.selection import Selection
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import decode, encode


def exists(process: int) -> bool:
    """Return True if a process runs and is no zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return False
    return state != "Z"


def ask(connection: Connection, message: Message) -> object:
    connection.send(Frame(encode(message)))
    return decode(connection.receive(SECONDS).head)


@pytest.fixture(name="wait_for", scope="session")
def _wait_for():
    return wait_for


@pytest.fixture(name="exists", scope="session")
def _exists():
    return exists


@pytest.fixture(name="ask", scope="session")
def _ask():
    return ask


@pytest.fixture(scope="session")
def registry() -> Registry:
    return load_registry(Selection(), builtins=builtin_plugins(), kinds={"transports", "channels"})


@pytest.fixture
def dial(registry):
    dialled: list[Connection] = []

    def connect(url: str) -> Connection:
        dialled.append(transport_for(url, registry.transports).connect(url, Limits(), SECONDS))
        return dialled[-1]

    yield connect
    for connection in dialled:
        connection.close()


@pytest.fixture(scope="session")
def executor():
    with start_executor(host="127.0.0.1", threads=1) as executor:
        yield executor


@pytest.fixture(scope="session")
def server(tmp_path_factory, plain_environment):
    server = start_server(fresh_python, tmp_path_factory.mktemp("server"), env=plain_environment)
    yield server
    assert server.stop() == 0, server.log.read_text()


@pytest.fixture(scope="module")
def keeping(start_python, tmp_path_factory, plain_environment):
    """Connect to a server with a filled weight store. Yield a safetensors file whose weights are stored."""
    import torch
    from configured import configured
    from safetensors.torch import save_file

    import djinn
    from djinn_core.wire.digests import digest_of_content
    from djinn_server.disk_quota import DiskQuota
    from djinn_server.weights.store import WeightStore

    folder = tmp_path_factory.mktemp("keeping")
    file = folder / "models" / "model.safetensors"
    file.parent.mkdir()
    tensors = {f"{n}.weight": torch.randn(256, 256 + n) for n in range(8)}
    save_file(tensors, file)
    store = WeightStore(folder / "weights", 1 << 30, DiskQuota())
    for data in [tensor.view(torch.uint8).reshape(-1) for tensor in tensors.values()]:
        assert store.put(digest_of_content(data.numpy()), data).wait(300)
    options = ["--store", str(folder / "weights"), "--threads", "1", "--drain-seconds", "1"]
    server = start_server(start_python, folder, *options, env=plain_environment)
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local",)):
        djinn.init()
        yield file
    server.stop()
