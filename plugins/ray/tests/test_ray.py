"""A real Ray cluster of several nodes on this machine: `python -m evaluation ray`. Skipped without Ray."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

import djinn
from djinn.errors import StartupError
from djinn.hooks import LaunchRequest
from djinn.testing import ExecutorConformance, open_connections
from djinn_ray import RayEngine, Settings

pytest.importorskip("ray", reason="python -m evaluation ray installs Ray and runs these tests")
# Ray causes deprecation warnings and leaves sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore")

DEVICE = "remote_accelerator:0"
STORE = 80 << 20  # bytes of each node's object store; Djinn uses none
SECONDS = 240.0


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options = {"object_store_memory": STORE, "include_dashboard": False}
    found = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "ray_client_server_port": 21001, "resources": {"head": 1}, **options},
    )
    for _ in range(2):
        found.add_node(num_cpus=4, num_gpus=1, resources={"slot": 1}, object_store_memory=STORE)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    yield found
    djinn.shut_down()
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def engine(cluster):
    """Return a function that configures programs for the cluster."""

    def configure(ray=None, **settings):
        djinn.shut_down()
        djinn.configure()
        djinn.configure(
            plugins=["ray", "tcp", "pool", "round_robin"],
            engine="ray",
            start_timeout=SECONDS,
            plugin_settings={"ray": ray or {}},
            **{"threads": 1, "resources": {"slot": 1}, **settings},
        )

    yield configure
    djinn.shut_down()
    djinn.configure()


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, pad_token_id=0, **sizes)).eval()


def generate(model, device, tokens=12):
    ids = torch.arange(1, 9).reshape(1, -1).to(device)
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return made.tolist()


def losses(device, between=lambda: None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        if step == 2:
            between()
    return found


def executors():
    return [opened.executor for opened in open_connections()]


def actor(executor):
    """Return Ray's facts about the executor's actor: process and node."""
    from ray._private import state

    return state.actors(executor._process._handle._actor._actor_id.hex())


def lose_node(executor, aside):
    """Kill an actor and move its journals away. All nodes share one folder here, so a lost node keeps none."""
    process, name = actor(executor)["Pid"], executor._process._handle._arguments[1]
    journals = Path(tempfile.gettempdir()) / f"djinn-launched-{os.geteuid()}" / name / "journals"
    journals.rename(aside)
    before = executor.process_id
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(before), "the executor is left")


def environment(process):
    return psutil.Process(process).environ()


def wait_for(condition, what):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.usefixtures("cluster")
class TestRayEngine(ExecutorConformance):
    @pytest.fixture
    def engine(self):
        return RayEngine(Settings())

    @pytest.fixture
    def launch_request(self):
        return LaunchRequest(group="conformance", resources={"CPU": 1.0})


def test_generation_equals_local_and_bypasses_object_store(engine, model):
    import ray

    engine()
    remote = copy.deepcopy(model).to(DEVICE)
    assert generate(remote, DEVICE) == generate(model, "cpu")
    big = torch.rand(4 << 20, device=DEVICE)
    assert torch.equal((torch.ones(4 << 20).to(DEVICE) + big).cpu() - 1, (big + 1 - 1).cpu())
    assert open_connections()[0].url.startswith("tcps://")
    used = [node["Resources"]["object_store_memory"] for node in ray.nodes() if node["Alive"]]
    assert ray.available_resources()["object_store_memory"] > sum(used) - (1 << 20), "tensors went through Ray"


@pytest.mark.parametrize("victim", ["executor", "actor"])
def test_pool_survives_killed_actors(engine, victim):
    """Two executors on two nodes train. One executor, or its actor, is killed."""
    engine(executors=2, placement_policy="round_robin")
    nodes = []

    def kill():
        nodes.extend(actor(executor)["Address"]["NodeID"] for executor in executors())
        first = executors()[0]
        os.kill(first.process_id if victim == "executor" else actor(first)["Pid"], signal.SIGKILL)

    assert losses(DEVICE, kill) == losses("cpu")
    assert len(set(nodes)) == 2, "the placement group spreads them"


def test_shared_journals_survive_node_loss(engine, cluster, tmp_path):
    killed = [cluster.add_node(num_cpus=1, resources={"volatile": 1}, object_store_memory=STORE) for _ in range(2)]
    engine(resources={"volatile": 1}, ray={"journals": str(tmp_path)})
    djinn.init()

    def kill():
        name, before = actor(executors()[0])["Address"]["NodeID"], executors()[0].process_id
        (node,) = [one for one in killed if one.node_id == name]
        killed.remove(node)
        cluster.remove_node(node, allow_graceful=False)
        wait_for(lambda: not psutil.pid_exists(before), "the executor ends with its node")  # training would end earlier

    try:
        assert losses(DEVICE, kill) == losses("cpu")
        djinn.shut_down()
        assert not list(tmp_path.iterdir()), "journals go with the session"
    finally:
        for node in killed:
            cluster.remove_node(node)


def test_lost_local_journal_error_names_remedy(engine, tmp_path):
    engine(resources={"slot": 1})
    kept = torch.ones(3, device=DEVICE) + 1
    assert kept.sum().item() == 6
    lose_node(executors()[0], tmp_path / "gone")
    with pytest.raises(djinn.errors.SessionLost, match=r"was lost with its actor.*plugins\.ray\.journals.*standby"):
        (kept + 1).cpu()
    djinn.init()
    assert torch.ones(2, device=DEVICE).sum().item() == 2


def test_standby_restores_lost_node_without_shared_folder(engine, tmp_path):
    """The replay log of this program restores the state of a lost node, also in a pool."""
    engine(executors=2, placement_policy="round_robin", standby=["engine"])
    expected = losses("cpu")
    assert losses(DEVICE, lambda: lose_node(executors()[1], tmp_path / "gone")) == expected


def test_scaling_during_training_changes_no_results(engine):
    engine(executors=1, resources={"CPU": 1}, placement_policy="round_robin")
    counts = []

    def scale():
        for count in (3, 2):
            djinn.scale(executors=count)
            counts.append(len(executors()))

    assert losses(DEVICE, scale) == losses("cpu")
    assert counts == [3, 2]


def test_executor_leaves_drained_node(engine, cluster):
    nodes = [cluster.add_node(num_cpus=1, resources={"volatile": 1}, object_store_memory=STORE)]
    engine(resources={"volatile": 1})
    djinn.init()
    before = executors()[0].process_id

    def drain():
        nodes.append(cluster.add_node(num_cpus=1, resources={"volatile": 1}, object_store_memory=STORE))
        name = actor(executors()[0])["Address"]["NodeID"]
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "drain-node",
            "--address",
            cluster.address,
            "--node-id",
            name,
        ]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "it is taken away"]
        subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True, capture_output=True)
        wait_for(
            lambda: [one.process_id for one in executors()] not in ([before], [before, 0]) and len(executors()) == 1,
            "it stays",
        )

    try:
        assert losses(DEVICE, drain) == losses("cpu")
        wait_for(lambda: not psutil.pid_exists(before), "its process stays")
    finally:
        djinn.shut_down()
        for node in nodes:
            cluster.remove_node(node)


def test_impossible_resources_are_refused_at_once(engine):
    engine(resources={"GPU": 2})
    began = time.monotonic()
    with pytest.raises(StartupError, match=r"can never hold an executor with 2 GPU.*1 GPU.*resources"):
        djinn.init()
    assert time.monotonic() - began < 15


def test_busy_resources_are_awaited(engine, capsys, monkeypatch):
    import ray

    holder = ray.remote(resources={"head": 1})(type("Holder", (), {"here": lambda self: True})).remote()
    ray.get(holder.here.remote())
    engine(resources={"head": 1}, ray={"pending_seconds": 2.0})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(StartupError, match=r"had no place for executor 0 in \d s: it needs 1 head.*pending_seconds"):
        djinn.init()
    assert "waiting for the Ray cluster to place executor 0" in capsys.readouterr().err
    engine(resources={"head": 1})
    from threading import Timer

    Timer(3.0, lambda: ray.kill(holder)).start()
    assert torch.ones(2, device=DEVICE).sum().item() == 2


def test_executors_use_user_placement_group_and_environment(engine):
    import ray

    group = ray.util.placement_group([{"CPU": 2, "GPU": 1}] * 2, strategy="STRICT_SPREAD", name="mine")
    ray.get(group.ready())
    try:
        for given in (group, "mine"):
            engine(
                executors=2,
                placement_group=given,
                resources={},
                runtime_env={"env_vars": {"OMP_NUM_THREADS": "3", "MINE": "1"}},
            )
            djinn.init()
            seen = [environment(executor.process_id) for executor in executors()]
            assert {(one["MINE"], one["OMP_NUM_THREADS"]) for one in seen} == {("1", "3")}
            assert {one["CUDA_VISIBLE_DEVICES"] for one in seen} == {"0"}, "Ray says which GPU an actor has"
            assert not [name for name in seen[0] if "AUTH" in name]
    finally:
        djinn.shut_down()
        ray.util.remove_placement_group(group)


def test_executor_uses_requested_threads(engine):
    engine(resources={"slot": 1, "CPU": 2}, threads=None)
    assert (torch.ones(2, device=DEVICE) + 1).sum().item() == 4
    assert "OMP_NUM_THREADS" not in environment(executors()[0].process_id)
    assert open_connections()[0].attached.device.threads == 2


def test_next_session_gets_a_forked_executor(engine):
    """The executor is forked from a process of the node that outlives sessions, up to the time in the setting."""
    engine(ray={"prepared_seconds": 30.0})
    folder = Path(tempfile.gettempdir()) / f"djinn-launched-{os.geteuid()}"
    djinn.init()
    assert losses(DEVICE) == losses("cpu")
    wait_for(lambda: any(path.is_socket() for path in folder.glob("prepared-*")), "no process to fork from")
    djinn.shut_down()
    assert losses(DEVICE) == losses("cpu")
    parent = psutil.Process(executors()[0].process_id).parent()
    assert "djinn_launchers.fork_server" in parent.cmdline()
    djinn.shut_down()
    wait_for(lambda: not parent.is_running(), "it stays longer than it should")
    assert not any(path.is_socket() for path in folder.glob("prepared-*"))


def test_error_names_node_without_packages(engine, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import sys

            class Missing:
                def find_spec(self, name, path=None, target=None):
                    if name.split(".")[0] == "djinn_core":
                        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

            sys.meta_path.insert(0, Missing())
            """
        )
    )
    engine(runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
    with pytest.raises(StartupError, match=r"lacks a package.*djinn_core.*runtime_env"):
        djinn.init()


def test_unresponsive_actor_is_not_dead(engine):
    engine()
    djinn.init()
    (executor,) = executors()
    process = actor(executor)["Pid"]
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(StartupError, match="does not answer"):
            executor._process.status(2.0)
        assert executor.alive
        assert torch.ones(2, device=DEVICE).sum().item() == 2, "data does not pass through the actor"
    finally:
        os.kill(process, signal.SIGCONT)
    assert executor._process.status(SECONDS).sessions


DRIVER = """
import sys, time, torch, djinn
djinn.configure(threads=1, start_timeout=200, resources={"slot": 1}, executors=2, placement_policy="round_robin")
x = torch.ones(3, device="remote_accelerator:0") + 1
assert x.sum().item() == 6
print(djinn.compat.get_runtime_state().servers, flush=True)
from djinn.testing import open_connections
print([one.executor.process_id for one in open_connections()], flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def driver(cluster, tmp_path, plain_environment):
    """Start a driver in a separate process. Return its executors."""
    drivers = []

    def start(address):
        script = tmp_path / "driver.py"
        script.write_text(DRIVER)
        log = tmp_path / "log"
        variables = {"DJINN_ENGINE": "ray", "RAY_ADDRESS": cluster.address}
        variables |= {"DJINN_ENGINE_ADDRESS": address} if address else {}
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", script],
            env=plain_environment | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        drivers.append(process)
        assert process.stdout.readline(), log.read_text()
        return process, json.loads(process.stdout.readline())

    yield start
    for process in drivers:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize("address", ["", "ray://127.0.0.1:21001"])
@pytest.mark.parametrize("number", [signal.SIGKILL, 0])
def test_no_actors_remain_after_driver_exit(driver, address, number):
    """One driver ends and one is killed, each connected as a driver or as a Ray client."""
    import ray
    from ray.util import placement_group_table

    process, started = driver(address)
    assert all(psutil.pid_exists(one) for one in started)
    if number:
        process.send_signal(number)
    else:
        process.stdin.write("\n")
        process.stdin.close()
    assert process.wait(SECONDS) == -number
    wait_for(lambda: not any(psutil.pid_exists(one) for one in started), "executors are left")
    wait_for(
        lambda: all(
            one["state"] == "REMOVED" for one in placement_group_table().values() if one["name"].startswith("djinn-")
        ),
        "a placement group is left",
    )
    from ray._private import state

    wait_for(
        lambda: (
            not [
                one
                for one in state.actors().values()
                if one["ActorClassName"] == "ExecutorHolder" and one["State"] == "ALIVE"
            ]
        ),
        "an actor is left",
    )
    assert ray.is_initialized()


def test_gateway_executors_run_on_cluster(cluster, tmp_path, plain_environment, model):
    """Clients reach executors over TLS, each with its own certificate, and survive the loss of one executor."""
    from servers import start_server

    def start(*command, stdout, stderr, env):
        variables = {"RAY_ADDRESS": cluster.address, "DJINN_RESOURCES": "slot=1", "DJINN_START_TIMEOUT": "200"}
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *map(str, command)], stdout=stdout, stderr=stderr, env=env | variables
        )

    options = ["--engine", "ray", "--executors", "2", "--tls-self-signed", "--drain-seconds", "1", "--threads", "1"]
    server = start_server(start, tmp_path, *options, env=plain_environment)
    djinn.shut_down()
    try:
        djinn.configure(
            connection_file=server.file,
            server_devices="0,1",
            placement_policy="round_robin",
            plugins=["tcp", "pool", "round_robin"],
        )
        djinn.init()
        opened = open_connections()
        assert {one.url.partition("://")[0] for one in opened} == {"tcps"}
        assert len({one.url for one in opened} | set(server.urls)) > 2, "not by way of the gateway"
        first = opened[0].now.process
        assert losses(DEVICE, lambda: os.kill(first, signal.SIGKILL)) == losses("cpu")
        assert opened[0].now.process
    finally:
        djinn.shut_down()
        djinn.configure()
        assert server.stop() == 0, server.log.read_text()
