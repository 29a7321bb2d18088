"""One tenant crashes its executor repeatedly while another one generates: the other's tokens must stay correct.

    python -m evaluation.load.crashing_tenant --crashes 20 --json

Starts a server with two tenants. One kills its executor with a segmentation fault in a loop, as a broken kernel would.
The other one generates with a small GPT-2 in a loop, and compares its tokens with locally computed ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from evaluation.served import plain_environment, start_server

GENERATING = """
import sys, time, torch, djinn
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, bos_token_id=0, eos_token_id=0)).eval()
prompt = torch.randint(0, 1000, (1, 8))
def generate(model, prompt):
    return model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
expected = generate(model, prompt)
model.to("remote_accelerator:0")
while True:
    began = time.monotonic()
    tokens = generate(model, prompt.to("remote_accelerator:0")).cpu()
    print(int(torch.equal(tokens, expected)), round(time.monotonic() - began, 3), flush=True)
"""
# The client kills its executor, like a kernel that reads out of bounds.
CRASHING = """
import os, signal, time, torch, djinn
from djinn_client.runtime import client
while True:
    try:
        djinn.init()
        x = torch.ones(100).to("remote_accelerator:0")
        assert x.sum().item() == 100
        os.kill(client.context.opened[0].attached.process, signal.SIGSEGV)
        print("crash", flush=True)
        x.sum().item()
    except djinn.DjinnError:
        time.sleep(0.2)
"""


def djinn(*arguments: str) -> str:
    command = [sys.executable, "-m", "djinn_core.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=plain_environment()).stdout.strip()


def crash_in_a_loop(url: str, token: str, crashes: int, seconds: float) -> int:
    """Crash the executor until the count or the time is reached. Return the number of crashes."""
    command, own = [sys.executable, "-c", CRASHING], plain_environment(DJINN_SERVERS=url, DJINN_TOKEN=token)
    client = subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    limit = threading.Timer(seconds, client.kill)
    limit.start()
    assert client.stdout is not None
    seen = sum(1 for _ in itertools.islice((line for line in client.stdout if line == "crash\n"), crashes))
    limit.cancel()
    client.kill()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crashes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0, help="at most so long")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = [djinn("token", "create", who, "--file", str(folder / "tokens.json")) for who in ("calm", "crashing")]
        limits = ("--store-gib", "0", "--drain-seconds", "0", "--lease-seconds", "0")
        server = start_server(folder, "--token-file", str(folder / "tokens.json"), *limits)
        reading = plain_environment(DJINN_SERVERS=server.tcp, DJINN_TOKEN=tokens[0])
        calm = subprocess.Popen([sys.executable, "-c", GENERATING], stdout=subprocess.PIPE, env=reading, text=True)
        assert calm.stdout is not None
        first = calm.stdout.readline()
        assert first, "the calm tenant could not begin"
        crashes = crash_in_a_loop(server.tcp, tokens[1], options.crashes, options.seconds)
        went_on = calm.poll() is None
        calm.kill()
        rounds = [first.split(), *(line.split() for line in calm.stdout if len(line.split()) == 2)]
        server.stop()
    figures = {
        "crashes": crashes,
        "generations": len(rounds),
        "wrong_generations": sum(right != "1" for right, _ in rounds),
        "calm_tenant_went_on": int(went_on),
        "slowest_generation_s": max(float(seconds) for _, seconds in rounds),
        "calm_tenant_unharmed": int(went_on and crashes > 0 and all(right == "1" for right, _ in rounds)),
    }
    print(json.dumps(figures) if options.json else figures)


if __name__ == "__main__":
    main()
