"""A second process, another session and a restarted server need not be sent what the server has seen."""

from __future__ import annotations

import json

import pytest

CLIENT = """
import json, sys, torch, djinn
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)], torch.nn.Linear(512, 17_000))
given = torch.randn(2, 512)
expected = model(given).detach()
other = model[0].weight.detach().clone().add_(1)
remote = model.to("remote_accelerator:0")
with torch.no_grad():
    right = torch.allclose(remote(given.to("remote_accelerator:0")).cpu(), expected, atol=1e-5)
    for parameter in remote.parameters() if "overwrites" in sys.argv else ():
        parameter.zero_()  # what is here must not become what others find
    right &= bool((other.to("remote_accelerator:0") == other.to("remote_accelerator:0", copy=True)).all())
    zero = float(sum(p.abs().sum() for p in remote.parameters()))
    remote.cpu()
print(json.dumps({"right": bool(right), "zero": zero, **djinn.stats()}))
"""


@pytest.fixture
def client(python, plain_environment):
    def run(server, *arguments, scheme="tcp"):
        plain = {"DJINN_SERVERS": server.url(scheme), "DJINN_TOKEN": server.token, "DJINN_DISABLE": "local"}
        done = python.run("-c", CLIENT, *arguments, env=plain_environment | plain)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["right"]
        assert found["zero"] == 0.0 or "overwrites" not in arguments
        return found

    return run


def test_weights_are_not_sent_again(own_server, client, wait_for, tmp_path):
    store = tmp_path / "weights"
    server = own_server("--store", str(store))
    first = client(server)
    large = 4 * (17_000 * 512 + 6 * 512 * 512)
    # A server writes beside its other work: who begins at once may come too early, who overwrites at once keeps nothing.
    wait_for(lambda: sum(f.stat().st_size for f in store.rglob("[!n]*") if f.is_file()) >= large, "the weights' files")
    second = client(server, "overwrites", scheme="http")
    # Nothing, but `other`, which it sends twice, where the server has written it by then.
    assert first["bytes_recalled"] in {0, 4 * 512 * 512}
    assert second["bytes_sent"] < 0.01 * first["bytes_sent"]
    assert second["bytes_uploaded"] + second["bytes_recalled"] == first["bytes_uploaded"] + first["bytes_recalled"]
    server.stop()
    server.file.unlink(missing_ok=True)
    assert client(own_server("--store", str(store)), "overwrites")["bytes_sent"] < 0.01 * first["bytes_sent"]
