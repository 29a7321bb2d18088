"""Interception is replaced by a plugin: real programs over a second implementation, in a process without the native library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BEGIN = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import copy
import djinn, djinn.testing, mode_device, torch
from djinn_client.interception.recording.recorder import recorders

djinn.configure(plugins=[mode_device], interception="mode")
REMOTE = "remote_accelerator:0"
"""
END = """
assert not recorders.begun, "the native device has not begun"
assert not any("djinn_native" in line for line in open("/proc/self/maps")), "nor is its library loaded"
assert len(djinn.testing.executor_processes()) == 1
print("done")
"""
README = """
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
model.to("remote_accelerator:0")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(8, 16, device="remote_accelerator:0")
loss = model(inputs).square().mean()
loss.backward()
optimizer.step()
assert djinn.stats()["round_trips"] == 0, "so far, nothing was fetched"
assert loss.item() > 0
assert djinn.stats()["round_trips"] == 1
before = djinn.testing.executor_figures()["values"]
del loss, model, optimizer, inputs
djinn.synchronize()
assert djinn.testing.executor_figures()["values"] < before, "values are freed with their tensors"
"""
TRAINING = """
def trained(device):
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(20, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 20)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(0, 20, (4, 9)).to(device)
    losses = []
    for _ in range(4):
        logits = model(tokens[:, :-1])
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
        djinn.synchronize()
    return [loss.item() for loss in losses] + [value.detach().cpu() for value in model.state_dict().values()]

for here, there in zip(trained("cpu"), trained(REMOTE), strict=True):
    torch.testing.assert_close(there, here, rtol=0, atol=0)
assert djinn.stats()["templates_reused"], "steps after the first are known programs"
"""
GENERATE = """
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
sizes = dict(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager")).eval()
prompt = torch.tensor([[3, 7, 11]])
options = dict(max_new_tokens=8, do_sample=False, pad_token_id=1)
here = model.generate(prompt, **options)
there = copy.deepcopy(model).to(REMOTE).generate(prompt.to(REMOTE), **options)
assert there.device == torch.device(REMOTE)
assert there.cpu().tolist() == here.tolist()
"""
SESSIONS = """
kept = torch.arange(3).to(REMOTE)
assert (kept + 1).cpu().tolist() == [1, 2, 3]
djinn.shut_down()
assert (torch.arange(3).to(REMOTE) * 2).cpu().tolist() == [0, 2, 4]
"""


def test_programs_run_over_mode_interception(plain_environment, tmp_path):
    """One process runs all programs, because starting an interpreter with an executor takes longer than they do."""
    (tmp_path / "program.py").write_text(BEGIN + README + TRAINING + GENERATE + SESSIONS + END)
    environment = plain_environment | {"DJINN_INTERCEPTION": "mode"}
    command = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr
