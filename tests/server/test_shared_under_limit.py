"""Several sessions read the same weights on an executor with a memory limit: one copy, dropped and read again, until a session writes."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from configured import configured
from long_forms import long_or
from safetensors.torch import load_file, save_file

import djinn
from djinn.testing import executor_figures
from djinn_client.runtime.sending import submissions
from djinn_client.runtime.sending.submissions import framed
from djinn_core.errors import UnsupportedOperation
from djinn_core.wire.frames import Frame
from djinn_core.wire.messages import Submit

MIB = 1 << 20
LIMIT = 40 * MIB
NAMES = [f"layer{number}" for number in range(16)]
CLIENT = """
import json, random, sys, torch
import djinn
from safetensors.torch import load_file
from djinn.testing import executor_figures

torch.set_num_threads(1)
WRITES = (
    lambda t: t.add_(1),
    lambda t: t[1:].mul_(2),
    lambda t: t.view(-1)[::3].zero_(),
    lambda t: torch.add(t, 1, out=t),
    lambda t: t.t().copy_(t.t() * 0.5),
    lambda t: torch._foreach_add_([t], 2),
    lambda t: t.detach().unbind(0)[1].neg_(),
    lambda t: torch.ops.aten._unsafe_view(t, (t.numel(),)).neg_(),
)
READS = (lambda t: t * 2 - 1, lambda t: t.reshape(-1), lambda t: t[2:].clone(), lambda t: t.sum(1), lambda t: t.contiguous())

def work(seed, folder):
    chance = random.Random(seed)
    weights = djinn.open_weights(f"file:{folder}")
    local, ours = load_file(f"{folder}/model.safetensors"), dict(weights)
    extra = []
    for _ in range(40):
        name = chance.choice(list(local))
        if chance.random() < 0.3:
            do = chance.choice(WRITES)
            do(ours[name]), do(local[name])
        elif extra and chance.random() < 0.3:
            one, other = chance.choice(extra)
            one.add_(1), other.add_(1)
        else:
            do = chance.choice(READS)
            extra.append((do(ours[name]), do(local[name])))
            del extra[:-6]
        if chance.random() < 0.5:
            djinn.synchronize()
        if chance.random() < 0.1:
            ours[name], local[name] = weights[name], load_file(f"{folder}/model.safetensors")[name]
    wrong = [name for name in local if not torch.equal(ours[name].cpu(), local[name])]
    return wrong + [number for number, (one, other) in enumerate(extra) if not torch.equal(one.cpu(), other)]

for line in sys.stdin:
    seed, folder = line.split()
    print(json.dumps({"wrong": work(int(seed), folder), **executor_figures()}), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models")
    save_file({name: torch.randn(512, 512) for name in NAMES}, path / "model.safetensors")
    return path


@pytest.fixture
def limited(own_server, folder):
    return own_server("--models", str(folder), "--threads", "1", "--memory-gib", str(LIMIT / 2**30))


def test_random_programs_of_several_sessions_equal_local(limited, folder, python, plain_environment):
    env = plain_environment | {"DJINN_CONNECTION_FILE": str(limited.file)}
    clients = [python.start_talking("-c", CLIENT, env=env) for _ in range(3)]
    try:
        for turn in range(long_or(1, 2)):
            for number, client in enumerate(clients):
                client.stdin.write(f"{10 * turn + number} {folder}\n")
                client.stdin.flush()
            told = [json.loads(client.stdout.readline()) for client in clients]
            assert [one["wrong"] for one in told] == [[], [], []]
        assert max(one["evictions"] for one in told) > 0
        assert max(one["reread_bytes"] for one in told) > 0
        assert max(one["memory_run_peak"] for one in told) <= LIMIT
    finally:
        for client in clients:
            with client:
                client.kill()


def test_shared_weights_count_once_and_are_dropped(limited, folder):
    with configured(connection_file=limited.file):
        djinn.init()
        weights = djinn.open_weights(f"file:{folder}")
        twice = [weights[name] for name in NAMES for _ in range(3)]  # 48 MiB, counted each for itself
        assert sum(one.sum() for one in twice).isfinite()
        figures = executor_figures()
        assert figures["memory_shared"] == 16 * MIB
        assert figures["evictions"] == 0
        # What is in use is not written to the disk in the place of weights. It is less than half of the limit: up to the other half is
        # kept free for as much as the process has grown beside its values, which depends on PyTorch's libraries.
        assert torch.ones(4 * MIB, device="remote_accelerator:0").sum().item() == 4 * MIB
        dropped = executor_figures()
        assert dropped["evictions"] > 0
        assert dropped["spilled_bytes"] == 0
        local = load_file(folder / "model.safetensors")
        assert all(torch.equal(one.cpu(), local[name]) for name, one in zip(NAMES, twice[::3], strict=True))
        again = executor_figures()
        assert again["reread_bytes"] > dropped["reread_bytes"]
        written = twice[0].add_(1)
        assert torch.equal(written.cpu(), twice[1].cpu() + 1)
        del twice, written
        djinn.synchronize()
        assert executor_figures()["memory_shared"] == 0


def test_freed_values_are_subtracted_once(limited, folder):
    with configured(connection_file=limited.file):
        djinn.init()
        weights = djinn.open_weights(f"file:{folder}")
        twice = [weights[name] for name in NAMES for _ in range(2)]
        assert sum(one.sum() for one in twice).isfinite()
        assert executor_figures()["evictions"] == 0
        del twice[1::2]  # views of memory that the others have: nothing of it is free
        large = torch.ones(
            MIB * 9 // 2, device="remote_accelerator:0"
        )  # 18 MiB beside 16: more than goes without a look
        assert large[0].item() == 1
        assert executor_figures()["evictions"] > 0


@pytest.mark.parametrize("refused", [False, True])
def test_last_use_is_not_counted_as_shared(limited, folder, monkeypatch, refused):
    left = [UnsupportedOperation("too large")] if refused else []

    def sending(message: Submit) -> Frame:
        if left:
            raise left.pop()
        return framed(message)

    with configured(connection_file=limited.file):
        djinn.init()
        weights = djinn.open_weights(f"file:{folder}")
        twice = [weights[name] for name in NAMES for _ in range(2)]
        assert sum(one.sum() for one in twice).isfinite()
        monkeypatch.setattr(submissions, "framed", sending)
        made = torch.ones(3, device="remote_accelerator:0") if refused else sum(one.sum() for one in twice)
        del twice
        with pytest.raises(UnsupportedOperation) if refused else contextlib.nullcontext():
            made.sum().item()
        assert executor_figures()["memory_shared"] == 0


def test_changed_file_is_spilled_first(limited, folder, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / folder.name / "changing.safetensors"
    save_file({name: torch.ones(512, 512) for name in NAMES}, path)
    with configured(connection_file=limited.file):
        djinn.init()
        weights = djinn.open_weights(f"file:{path}")
        ours = dict(weights)
        assert sum(one.sum() for one in ours.values()).item() == 16 * 512 * 512
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\1")
        assert torch.ones(6 * MIB, device="remote_accelerator:0")[0].item() == 1
        assert executor_figures()["spilled_bytes"] > 0
        assert sum(one.sum() for one in ours.values()).item() == 16 * 512 * 512
    path.unlink()
