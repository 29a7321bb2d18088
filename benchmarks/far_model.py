"""A model of several gigabytes on a server's disk, used by a client in a network namespace of its own, which counts bytes.

    python benchmarks/far_model.py [--gib 3]

Needs the right to make network namespaces (root). A Llama with random weights, tied embeddings and sharded safetensors files lies in
the server's cache of the hub; the client has its configuration alone. The client loads it, generates, publishes it and ends; a second client
attaches it and generates. The same tokens are made locally. One JSON object on the last line; exits with 1 where tokens differ or 2 MB
were exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME, OUTSIDE, INSIDE = "djinn-far", "djinn-out", "djinn-in"
HOST, GUEST = "10.213.77.1", "10.213.77.2"
MOST_BYTES = 2_000_000
PROGRAM = """
import json, sys, time, torch
began = time.perf_counter()
device, cache, way = sys.argv[1:]
torch.set_num_threads(1)
if device != "cpu":
    import djinn
from transformers import AutoConfig, AutoModelForCausalLM
ready = time.perf_counter()
options = {"cache_dir": cache, "local_files_only": True, "dtype": torch.bfloat16}
if way == "attach":
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("org/model", cache_dir=cache), dtype=torch.bfloat16)
    found = djinn.attach("far")
    model.load_state_dict(dict(found), assign=True, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    model.eval()
else:
    model = AutoModelForCausalLM.from_pretrained("org/model", device_map=device, **options).eval()
with torch.no_grad():
    first = model(torch.arange(1, 9, device=device)[None]).logits[0, -1].float().argmax().item()
    token = time.perf_counter()
    made = model.generate(torch.arange(1, 9, device=device)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()
if way == "publish":
    djinn.publish("far", {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"})
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"tokens": [first, *made], "first_token": token - ready, "peak": peak}))
"""


def make_model(folder: Path, gib: float) -> tuple[Path, Path, int]:
    """Two caches of the hub, the server's and the client's, and the bytes of the model."""
    width = 2048
    layers = max(1, round((gib * 2**30 / 2 - 32_000 * width) / (13 * width**2)))
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    caches = folder / "server", folder / "client"
    for cache in caches:
        snapshot = cache / "models--org--model" / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (cache / "models--org--model" / "refs").mkdir()
        (cache / "models--org--model" / "refs" / "main").write_text(COMMIT)
        (model if cache == caches[0] else config).save_pretrained(snapshot)
    split = caches[0] / "models--org--model" / "snapshots" / COMMIT
    (split / "model.safetensors").unlink(missing_ok=True)
    model.save_pretrained(split, max_shard_size="700MB")
    return *caches, sum(one.nbytes for one in model.parameters())


@contextmanager
def namespace() -> Iterator[None]:
    """A network namespace with one way out, at `OUTSIDE`."""
    for line in (
        f"netns add {NAME}",
        f"link add {OUTSIDE} type veth peer name {INSIDE}",
        f"link set {INSIDE} netns {NAME}",
        f"addr add {HOST}/30 dev {OUTSIDE}",
        f"link set {OUTSIDE} up",
        f"-n {NAME} addr add {GUEST}/30 dev {INSIDE}",
        f"-n {NAME} link set {INSIDE} up",
        f"-n {NAME} link set lo up",
    ):
        subprocess.run(["ip", *line.split()], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "netns", "del", NAME], check=True)


def passed() -> int:
    """Bytes that went through the interface so far, in both directions."""
    folder = Path("/sys/class/net") / OUTSIDE / "statistics"
    return sum(int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx"))


def client(command: list[str], device: str, cache: Path, way: str, env: dict[str, str]) -> dict[str, Any]:
    """The answer of the program, with the bytes that went over the network meanwhile."""
    before = passed()
    done = subprocess.run(
        [*command, sys.executable, "-W", "ignore", "-c", PROGRAM, device, cache, way],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    return json.loads(done.stdout.splitlines()[-1]) | {"bytes": passed() - before}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="djinn-far-") as name, namespace():
        folder = Path(name)
        server_cache, client_cache, size = make_model(folder, options.gib)
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DJINN_CONFIG": os.devnull}
        token, file = folder / "token", folder / "connection.json"
        token.write_text("far-model-" * 4)
        token.chmod(0o600)
        flags = ["--host", HOST, "--insecure-plaintext-on-network", "--token-file", token, "--connection-file", file]
        flags += ["--models", server_cache, "--published", folder / "published", "--device", "cpu", "--threads", "1"]
        server = subprocess.Popen([sys.executable, "-m", "djinn_core.cli", "serve", *map(str, flags)], env=env)
        try:
            while not file.exists():
                assert server.poll() is None
                time.sleep(0.2)
            far = ["ip", "netns", "exec", NAME]
            there = env | {"DJINN_CONNECTION_FILE": str(file)}
            found = {
                way: client(far, "remote_accelerator:0", client_cache, way, there) for way in ("publish", "attach")
            }
            found["local"] = client([], "cpu", server_cache, "local", env)
        finally:
            server.terminate()
            server.wait()
    same = all(one["tokens"] == found["local"]["tokens"] for one in found.values())
    few = all(one["bytes"] < MOST_BYTES for one in found.values())
    print(json.dumps({"model_bytes": size, "same": same, **found}))
    sys.exit(not (same and few))


if __name__ == "__main__":
    main()
