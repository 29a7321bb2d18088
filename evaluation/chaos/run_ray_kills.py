"""Kill executors, actors and nodes of a Ray cluster under real programs, and compare results with local ones.

    python -m evaluation ray-kills --kills 100 --only node

One cluster on this machine, one executor. Each run of a program (greedy `generate()` of a small Llama, training with
AdamW) gets one SIGKILL at a uniformly random moment of its undisturbed duration. Nodes are raylets; journals are in a
shared folder. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import ray
import torch
from ray._private import state
from ray.cluster_utils import Cluster

import djinn
from djinn.testing import open_connections

REMOTE = "remote_accelerator:0"
STORE = 80 << 20
NODES = 2  # number of nodes that may be killed


def generation() -> Callable[[str], object]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, pad_token_id=0, **sizes)).eval()

    def run(device: str) -> object:
        here = copy.deepcopy(model).to(device)
        ids = torch.arange(1, 9).reshape(1, -1).to(device)
        with torch.no_grad():
            return here.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=100, do_sample=False).tolist()

    return run


def training() -> Callable[[str], object]:
    def run(device: str) -> object:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        results = []
        for _ in range(100):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 32, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            results.append(loss.item())
        return results

    return run


def actor() -> dict:
    (stream,) = open_connections()
    return state.actors(stream.executor._process._calls._actor._actor_id.hex())


def kill_executor(cluster: Cluster) -> None:
    del cluster
    kill_process(lambda: open_connections()[0].executor.process_id)


def kill_actor(cluster: Cluster) -> None:
    del cluster
    kill_process(lambda: actor()["Pid"])


def kill_process(number: Callable[[], int | None]) -> None:
    """Kill the process whose id `number` returns, once the process has started.

    Before, `number` returns None or 0. Neither gets a signal, because the id 0 means this process group.
    """
    until = time.monotonic() + 60
    while not (process := number()):
        if time.monotonic() > until:
            raise TimeoutError("no process to kill started")
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)


def kill_node(cluster: Cluster) -> None:
    name = actor()["Address"]["NodeID"]
    (node,) = [worker_node for worker_node in cluster.worker_nodes if worker_node.node_id == name]
    cluster.remove_node(node, allow_graceful=False)


VICTIMS = {"executor": kill_executor, "actor": kill_actor, "node": kill_node}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(VICTIMS))
    parser.add_argument(
        "--standby", action="store_true", help="keep no journals, so that the client's log recovers sessions"
    )
    options = parser.parse_args()
    chance = random.Random(options.seed)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    common = {"object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"engine": "ray", "threads": 1, "start_timeout": 200, "recover": not options.standby}
        settings |= {"standby": ["engine"]} if options.standby else {}
        djinn.configure(plugin_settings={"ray": {"journals": folder}}, **settings)
        programs = {"generation": generation(), "training": training()}
        for victim in options.only:
            for name, program in programs.items():
                results[f"{victim}_{name}"] = disturbed(cluster, VICTIMS[victim], program, options.kills, chance)
                sys.stderr.write(f"{victim} {name}: {results[f'{victim}_{name}']}\n")
        djinn.shut_down()
        leftover_count = sum(
            "djinn_server.executor" in " ".join(process.info["cmdline"] or ()) for process in own_processes()
        )
        results["left"] = {"executors": leftover_count, "files": len(list(Path(folder).iterdir()))}
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(results))


def own_processes() -> list[psutil.Process]:
    """Return processes of the cluster that this process started."""
    return [
        item for item in psutil.process_iter(["cmdline", "environ"]) if "RAY_JOB_ID" in (item.info["environ"] or {})
    ]


def disturbed(
    cluster: Cluster,
    kill: Callable[[Cluster], None],
    program: Callable[[str], object],
    kills: int,
    chance: random.Random,
) -> dict[str, object]:
    expected, equal, seconds, errors = program("cpu"), 0, [], []
    replenish(cluster)
    djinn.init()
    program(REMOTE)
    start = time.monotonic()
    assert program(REMOTE) == expected
    duration = time.monotonic() - start
    for _ in range(kills):
        replenish(cluster)
        timer = threading.Timer(chance.uniform(0.0, duration), quiet(kill), (cluster,))
        start = time.monotonic()
        timer.start()
        try:
            equal += program(REMOTE) == expected
            timer.join()
            torch.ones(1, device=REMOTE).item()  # the kill may have come at the very end
        except djinn.DjinnError as error:
            errors.append(f"{type(error).__name__}: {error}"[:300])
            timer.join()
            djinn.shut_down()
            djinn.init()
        seconds.append(time.monotonic() - start - duration)
    return {
        "kills": kills,
        "equal": equal,
        "undisturbed_s": round(duration, 2),
        "longer_by_s": {"median": round(statistics.median(seconds), 1), "most": round(max(seconds), 1)},
        "errors": errors,
    }


def quiet(kill: Callable[[Cluster], None]) -> Callable[[Cluster], None]:
    def run(cluster: Cluster) -> None:
        try:
            kill(cluster)
        except Exception:
            traceback.print_exc()

    return run


def replenish(cluster: Cluster) -> None:
    while len(cluster.worker_nodes) < NODES:
        cluster.add_node(num_cpus=1, object_store_memory=STORE, include_dashboard=False)


if __name__ == "__main__":
    main()
