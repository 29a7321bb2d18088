"""Executors join an open session and leave it: real processes, real training, compared bit for bit with an undisturbed run."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest
import torch
from configured import configured
from figures import figures
from servers import start_server

import djinn
from djinn.testing import executor_processes, open_connections
from djinn_client.interception.recording.recorder import current
from djinn_client.runtime import client
from djinn_core.wire.cache_messages import CacheReply, CacheRequest
from djinn_pool import scaling
from djinn_pool.routes import Routes

REMOTE = "remote_accelerator:0"


def train(at=None, steps=12):
    """Return losses of steps with dropout, AdamW, generator noise, and a tensor of an index.

    `at`: function by step, to call after that step.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4)]
    model = torch.nn.Sequential(*layers).to(REMOTE)
    optimizer = torch.optim.AdamW(model.parameters())
    given, generator = torch.randn(8, 16).to(REMOTE), torch.Generator(REMOTE)
    generator.manual_seed(5)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        noise = torch.randn(8, 16, generator=generator, device=REMOTE)
        loss = model(given + noise).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        if at and step in at:
            at[step]()
    return found


def scale(count):
    return lambda: djinn.scale(executors=count)


def fail_with(error):
    def fail(*_):
        raise error

    return fail


def test_session_scales_up_and_down(make_pool):
    with make_pool("round_robin", executors=1):
        expected = train()
        kept = torch.arange(6.0).to(REMOTE)
        view = kept[2:4]
        gc.freeze()  # as programs do that fork: their tensors are no less theirs
        assert train({2: scale(3)}) == expected
        assert torch.remote_accelerator.device_count() == 4
        placed = torch.arange(5.0).to("remote_accelerator:3")
        sent = figures(djinn.testing.open_session().router, 1)["peer_bytes"]
        assert train({3: scale(1), 7: scale(2)}) == expected
        assert figures(djinn.testing.open_session().router, 1)["peer_bytes"] >= sent > 0, (
            "what went there stays counted"
        )
        assert [device.id[0] for device in djinn.topology().devices] == ["0", "3"]
        view.add_(1)
        assert kept.tolist() == [0, 1, 3, 4, 4, 5], "views still look into the memory that moved"
        assert (placed * 2).tolist() == [0, 2, 4, 6, 8], "an index stands for the executor that has its values"
        assert len(executor_processes()) == len(djinn.compat.get_runtime_state().servers) == 2
        scale(1)()
        assert (torch.rand_like(placed) + torch.ones(5, device=placed.device)).device == placed.device
        djinn.configure(progress=False)  # the number of executors is a setting like any other, and is as it was set
        assert djinn.compat.is_initialized()


def test_executor_killed_while_joining_or_leaving_is_replaced(make_pool, monkeypatch):
    """A new executor replaces it and recovers its state. An executor that cannot be replaced joins no pool."""
    with make_pool("round_robin") as router:
        expected = train()

        def kill_in_the_middle(*given):
            os.kill(executor_processes()[-1], signal.SIGKILL)
            return move(*given)

        move, opening = router._routes.move, scaling.open_more
        monkeypatch.setattr(router._routes, "move", kill_in_the_middle)
        assert train({5: scale(1)}) == expected

        def open_and_kill(*given):
            opened = opening(*given)
            opened[0].executor.close(0.0)
            return opened

        monkeypatch.setattr(scaling, "open_more", open_and_kill)
        with pytest.raises(djinn.errors.SessionLost):
            djinn.scale(executors=2)
        monkeypatch.undo()
        assert len(open_connections()) == 1
        assert train({5: scale(2)}) == expected


def test_pool_starts_after_interrupted_join(make_pool, monkeypatch):
    """The executor whose join failed keeps its number, which no other executor gets."""
    with make_pool("round_robin", executors=1):
        expected = train()
        with monkeypatch.context() as failing:
            failing.setattr(Routes, "connect_peers", fail_with(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                djinn.scale(executors=2)
        assert len(open_connections()) == 1
        assert train({2: scale(3), 5: scale(2), 8: scale(1)}) == expected
        assert len(executor_processes()) == 1


def test_joined_executors_stay_after_interrupt(make_pool, monkeypatch):
    with make_pool("round_robin", executors=1):
        expected = train()
        kept = torch.arange(4.0).to(REMOTE)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(scaling, "update_offered_operators", fail_with(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                djinn.scale(executors=2)
        assert len(open_connections()) == len(executor_processes()) == client.settings().executors == 2
        djinn.synchronize()
        assert train({3: scale(1), 6: scale(2)}) == expected
        assert kept.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("failing", ["_planner.discard_plans", "_calibrate"])
def test_failed_join_is_forgotten(make_pool, monkeypatch, failing):
    with make_pool("round_robin") as router:
        expected, before = train(), router.topology()
        failed = []

        def fail_once(*_):
            if not failed:
                failed.append(len(router.topology().devices))
                raise RuntimeError("no more threads")

        with monkeypatch.context() as once:
            *owner, name = failing.split(".")
            once.setattr(router._planner if owner else router, name, fail_once)
            with pytest.raises(RuntimeError, match="threads"):
                djinn.scale(executors=3)
        assert failed == [3], "it failed when the pool counted on the third executor"
        assert router.topology().devices == before.devices
        assert {(a.source, a.target) for a in router.topology().links} == {(a.source, a.target) for a in before.links}
        assert len(executor_processes()) == client.settings().executors == 2
        assert train({2: scale(3), 6: scale(1)}) == expected


def test_each_session_has_own_router(make_pool):
    with make_pool("round_robin") as router:
        djinn.shut_down()
        djinn.init()
        assert djinn.testing.open_session().router is not router
        assert router.executors is not djinn.testing.open_session().executors


@pytest.mark.parametrize("executors", [1, 2])
def test_partial_join_is_undone(make_pool, monkeypatch, executors):
    with make_pool("round_robin", executors=executors):
        expected = train()
        session = djinn.testing.open_session()
        connect, made = session._connect, []

        def fail_at_the_second(*given):
            if made:
                raise djinn.errors.SessionLost("the second one is gone")
            made.append(connect(*given))
            return made[0]

        with monkeypatch.context() as failing:
            failing.setattr(session, "_connect", fail_at_the_second)
            with pytest.raises(djinn.errors.SessionLost, match="the second one"):
                djinn.scale(executors=executors + 2)
        assert len(session.executors.present) == len(executor_processes()) == executors
        assert train({2: scale(executors + 2), 6: scale(1)}) == expected


class InterruptedRouter:
    """A router whose first request to remove executors is interrupted."""

    def __init__(self, router):
        self._router, self._refused = router, False

    def __getattr__(self, name):
        return getattr(self._router, name)

    def leave(self, numbers):
        if not self._refused:
            self._refused = True
            raise KeyboardInterrupt
        self._router.leave(numbers)


def test_servers_join_and_leave_session(serving, start_python, plain_environment, tmp_path, monkeypatch):
    options = ["--threads", "1", "--drain-seconds", "0", "--store-gib", "0"]
    environment = plain_environment | {"DJINN_TOKEN": serving.token}
    other = start_server(start_python, tmp_path, *options, env=environment)
    first, second = (next(url for url in urls if url.startswith("tcp")) for urls in (serving.urls, other.urls))
    try:
        with configured(servers=[first], token=serving.token, disable=("local",), placement_policy="round_robin"):
            expected = train()
            kept = torch.arange(6.0).to(REMOTE)
            view = kept[2:4]
            changes = {3: lambda: djinn.scale(servers=[first, second]), 7: lambda: djinn.scale(servers=[second])}
            assert train(changes) == expected
            assert [one.url for one in open_connections()] != []
            assert djinn.compat.get_runtime_state().servers == (second,)
            view.add_(1)
            assert kept.tolist() == [0, 1, 3, 4, 4, 5], "views still look into the memory that moved"
            with pytest.raises(djinn.errors.ConfigurationError, match="run on servers"):
                djinn.scale(executors=2)
            with pytest.raises(djinn.errors.TransportError):
                djinn.scale(servers=[second, "tcp://127.0.0.1:9"])
            with monkeypatch.context() as interrupted:
                interrupted.setattr(
                    session := djinn.testing.open_session(), "router", InterruptedRouter(session.router)
                )
                with pytest.raises(KeyboardInterrupt):
                    djinn.scale(servers=[first])
            assert djinn.compat.get_runtime_state().servers == client.settings().servers == (second,)
            assert train() == expected
    finally:
        other.stop()


def test_invalid_scaling_is_refused(make_pool):
    with make_pool("round_robin") as router:
        with pytest.raises(djinn.errors.ConfigurationError, match="takes one argument: `executors`"):
            djinn.scale()
        with pytest.raises(djinn.errors.ConfigurationError, match="own"):
            djinn.scale(servers=["tcp://127.0.0.1:9"])
        event = torch.remote_accelerator.Event(enable_timing=True)
        event.record()
        djinn.synchronize()
        (holder,) = [n for n, member in enumerate(router.executors.members) if figures(member)["bound_values"]]
        with pytest.raises(djinn.errors.UnsupportedOperation, match="events"):
            current().send_then(lambda: router.leave([holder]))
        router._planner.memory = [0, 0]
        kept = torch.ones(3).to(f"remote_accelerator:{2 - holder}")
        with pytest.raises(djinn.errors.DoesNotFit, match=r"no other executor has .* free bytes"):
            current().send_then(lambda: router.leave([1 - holder]))
        assert len(router.executors.present) == 2
        assert kept.tolist() == [1, 1, 1]


def refuse_to_pin(ask):
    def refuse(message, kind):
        if isinstance(message, CacheRequest) and message.action == "pin":
            return CacheReply(0, 0, 0, limited=True, refused="it is full")
        return ask(message, kind)

    return refuse


def test_moved_caches_stay_pinned(make_pool, monkeypatch):
    with make_pool("round_robin", memory_gib=1 / 16) as router:
        with scaling.numbers_for(2) as numbers, scaling.numbers_for(1) as others:
            assert (numbers, others) == ((2, 2), (4, 1))
        kept = torch.arange(1 << 16, device="remote_accelerator:2")
        cache = djinn.kv_session([kept[5:], kept])
        assert cache.pin().pinned == 1 << 19
        with monkeypatch.context() as full:
            full.setattr(
                router.executors.members[0].replies, "ask", refuse_to_pin(router.executors.members[0].replies.ask)
            )
            with pytest.raises(djinn.errors.DoesNotFit, match=r"too little free memory to pin.*it is full"):
                djinn.scale(executors=1)
        assert [len(executor_processes()), cache.size().pinned] == [2, 0]
        second = torch.arange(1 << 16, device="remote_accelerator:2")
        other = djinn.kv_session([second])
        other.pin()
        djinn.scale(executors=1)
        assert [other.size().pinned, cache.size().pinned] == [1 << 19, 0]
        assert (kept + second).sum().item() == (1 << 16) * ((1 << 16) - 1)


def test_standby_log_restores_pool_executor(make_pool):
    """There are no journals: the program's log restores the state. Peer values pass through the program."""
    with make_pool("round_robin", recover=False, standby=["engine"]) as router:
        expected = train()
        assert train({5: lambda: os.kill(executor_processes()[1], signal.SIGKILL)}) == expected
        assert figures(router)["peer_bytes"] == 0
        assert (
            train({3: scale(3), 6: lambda: os.kill(executor_processes()[2], signal.SIGKILL), 8: scale(1)}) == expected
        )


def test_hooks_run_under_lock_during_scaling(monkeypatch):
    """A hook may start a thread that registers another hook, and wait for it."""
    free = []

    def take():
        free.append(client.context.lock.acquire(timeout=0))
        client.context.lock.release()

    def begin():
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    monkeypatch.setattr(client, "is_initialized", lambda: False)
    monkeypatch.setattr(client, "configure", lambda **_: None)
    monkeypatch.setattr(client, "init", begin)
    djinn.scale(executors=2)
    assert free == [True]
