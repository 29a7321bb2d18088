"""A head and a worker in separate network namespaces, joined by a cable: different addresses, as on two machines."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

pytest.importorskip("ray", reason="python -m evaluation ray installs Ray and runs these tests")
HEAD, WORKER = "10.77.0.1", "10.77.0.2"
SECONDS = 240
RAY = [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start"]


def run(*command, **options):
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": SECONDS}
    done = subprocess.run(list(map(str, command)), check=False, **options)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Yield a function that runs a command on one of two hosts, named by address."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need the superuser and the command ip")
    names = {HEAD: f"djinn-head-{os.getpid()}", WORKER: f"djinn-worker-{os.getpid()}"}
    if run("ip", "netns", "add", names[HEAD])[0]:
        pytest.skip("there can be no network namespaces here")
    run("ip", "netns", "add", names[WORKER])
    run("ip", "link", "add", "veth0", "netns", names[HEAD], "type", "veth", "peer", "veth1", "netns", names[WORKER])
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    try:
        for device, (address, name) in zip(("veth0", "veth1"), names.items(), strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            for one in ("lo", device):
                run("ip", "-n", name, "link", "set", one, "up")
        on = {address: ["ip", "netns", "exec", name] for address, name in names.items()}
        store = "--object-store-memory=80000000"
        head = [
            "--head",
            f"--node-ip-address={HEAD}",
            "--port=6399",
            "--num-cpus=1",
            "--include-dashboard=false",
            store,
        ]
        worker = [f"--address={HEAD}:6399", f"--node-ip-address={WORKER}", "--num-cpus=2", store]
        folder = f"--temp-dir={tmp_path_factory.mktemp('ray')}"
        assert run(*on[HEAD], *RAY, *head, folder, env=environment)[0] == 0
        code, said = run(*on[WORKER], *RAY, *worker, '--resources={"worker": 2}', env=environment)
        assert code == 0, said
        yield lambda address, *command, **variables: run(*on[address], *command, env=environment | variables)
    finally:
        for name in names.values():
            for process in run("ip", "netns", "pids", name)[1].split():
                psutil.Process(int(process)).send_signal(signal.SIGKILL)
            run("ip", "netns", "del", name)


def test_executors_run_on_other_host(hosts, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, torch, djinn
            from djinn.testing import open_connections

            djinn.configure(resources="worker=1", executors=2, threads=1, start_timeout=200, placement_policy="round_robin")
            x = torch.ones(64, 64, device="remote_accelerator:0")
            y = (x @ x + 1).relu()
            assert y.sum().item() == 64 * 64 * 65
            urls = [one.url for one in open_connections()]
            assert all(url.startswith("tcps://{WORKER}:") for url in urls), urls
            os.kill(open_connections()[0].executor.process_id, signal.SIGKILL)
            assert (y @ y).sum().item() == 64.0**3 * 65**2
            print("equal")
            """
        )
    )
    code, said = hosts(
        HEAD, sys.executable, "-W", "ignore", script, DJINN_ENGINE="ray", DJINN_ENGINE_ADDRESS=f"{HEAD}:6399"
    )
    assert code == 0, said
    assert said.endswith("equal\n")
