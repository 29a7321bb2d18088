"""A model of several gigabytes on a server's disk, used by a client in a network namespace that counts bytes.

    python -m evaluation.benchmarks.far_model [--kind transformers] [--gib 3] [--round-trip-ms 30 --mbit 100]

Needs the right to make network namespaces and memory cgroups (root). The model has random weights in sharded
safetensors files in the server's hub cache. The client has only its configuration, a tenth of the model's size as
memory, and as much disk. Kinds: a Llama with tied embeddings, which a first client publishes and a second one attaches;
a diffusers pipeline (DiT); a BERT of sentence-transformers. Results are compared with a local run. The last line is a
JSON object; the exit status is 1 if results differ or more than 2 MB were transferred.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from evaluation.benchmarks import links
from evaluation.served import served

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "djinn-far"
MOST_BYTES = 2_000_000
SHARD_BYTES = 700_000_000
START_SECONDS = 600  # timeout for the server's executor on a busy machine
HEAD = """
import json, sys, time, warnings, torch
warnings.simplefilter("ignore")
began = time.perf_counter()
device, cache, way = sys.argv[1:]
torch.set_num_threads(1)
if device != "cpu":
    import djinn
"""
TAIL = """
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"made": made, "first_seconds": first - ready, "peak": peak}))
"""
PROGRAMS = {
    "transformers": """
from transformers import AutoConfig, AutoModelForCausalLM
options = {"cache_dir": cache, "local_files_only": True, "dtype": torch.bfloat16}
ready = time.perf_counter()
if way == "attach":
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("org/model", cache_dir=cache), dtype=torch.bfloat16)
    found = djinn.weights.attach("far")
    model.load_state_dict(dict(found), assign=True, strict=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    model.eval()
else:
    model = AutoModelForCausalLM.from_pretrained("org/model", device_map=device, **options).eval()
with torch.no_grad():
    made = [model(torch.arange(1, 9, device=device)[None]).logits[0, -1].float().argmax().item()]
    first = time.perf_counter()
    made += model.generate(torch.arange(1, 9, device=device)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()
if way == "publish":
    djinn.weights.publish("far", {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"})
""",
    "diffusers": """
from diffusers import DiffusionPipeline
options = {"cache_dir": cache, "local_files_only": True, "torch_dtype": torch.bfloat16}
ready = time.perf_counter()
pipeline = DiffusionPipeline.from_pretrained("org/model", **options, **({"device_map": device} if device != "cpu" else {}))
pipeline.set_progress_bar_config(disable=True)
draw = torch.Generator().manual_seed(0)
image = pipeline([1], num_inference_steps=2, generator=draw, output_type="np").images
first = time.perf_counter()
made = [round(float(one), 6) for one in image.flatten()[::7]]
""",
    "sentence_transformers": """
from sentence_transformers import SentenceTransformer
ready = time.perf_counter()
options = {"dtype": torch.bfloat16, **({"device_map": device} if device != "cpu" else {})}
model = SentenceTransformer("org/model", cache_folder=cache, local_files_only=True, device=device, model_kwargs=options)
made = [round(float(one), 6) for one in model.encode(["the cat sat on a mat", "a dog"]).flatten()]
first = time.perf_counter()
""",
}
WAYS = {"transformers": ("publish", "attach"), "diffusers": ("load",), "sentence_transformers": ("load",)}


def write_shards(folder: Path, stem: str, model: torch.nn.Module) -> int:
    """Write random bfloat16 weights of a meta model to several files with an index. Return their bytes."""
    pool = torch.randn((64 << 20) + 8191).mul_(0.02).to(torch.bfloat16)
    shards: list[dict[str, torch.Tensor]] = [{}]
    places: dict[str, int] = {}
    size = total = 0
    for number, (name, one) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight":  # tied to the embedding
            continue
        if size + one.numel() * 2 > SHARD_BYTES and shards[-1]:
            _write_shard(folder, stem, len(shards), shards[-1])
            shards.append({})
            size = 0
        first = number * 131 % 8191
        plain = (
            torch.ones(1) if "norm" in name.lower() and name.endswith("weight") else pool[first : first + (64 << 20)]
        )
        shards[-1][name] = (
            plain.to(torch.bfloat16).repeat(-(-one.numel() // len(plain)))[: one.numel()].view(one.shape).clone()
        )
        places[name] = len(shards)
        size, total = size + one.numel() * 2, total + one.numel() * 2
    _write_shard(folder, stem, len(shards), shards[-1])
    files = {number: f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)}
    for number, file in files.items():
        (folder / f"{stem}-{number}").rename(folder / file)
    index = {"metadata": {"total_size": total}, "weight_map": {name: files[number] for name, number in places.items()}}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_shard(folder: Path, stem: str, number: int, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / f"{stem}-{number}", {"format": "pt"})
    tensors.clear()


def make_llama(folder: Path, gib: float) -> int:
    """Write a Llama, and return its bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 2048
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=max(1, round((gib * 2**30 / 2 - 32_000 * width) / (13 * width**2))),
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return write_shards(folder, "model", model)


def make_pipeline(folder: Path, gib: float) -> int:
    """Write a pipeline of a large transformer over few latents and a small image decoder. Return its bytes."""
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    sizes = {"block_out_channels": [32], "latent_channels": 4, "sample_size": 8}
    torch.manual_seed(0)
    decoder = AutoencoderKL(**sizes).to(torch.bfloat16).eval()
    heads, channels = 16, 128
    one_layer = 14 * (heads * channels) ** 2 + 6 * (heads * channels) ** 2  # with its conditional norm
    with torch.device("meta"):
        transformer = DiTTransformer2DModel(
            num_attention_heads=heads,
            attention_head_dim=channels,
            in_channels=4,
            out_channels=4,
            num_layers=max(1, round(gib * 2**30 / 2 / one_layer)),
            sample_size=8,
            num_embeds_ada_norm=1000,
        )
    small = DiTTransformer2DModel(
        num_attention_heads=1,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=1000,
    )
    DiTPipeline(small, decoder, DDIMScheduler()).save_pretrained(folder)
    for file in (folder / "transformer").iterdir():
        file.unlink()
    transformer.save_config(folder / "transformer")
    return write_shards(folder / "transformer", "diffusion_pytorch_model", transformer)


def make_encoder(folder: Path, gib: float) -> int:
    """Write a BERT with a tokenizer of a few words, and return its bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    width = 2048
    words = "[PAD] [UNK] [CLS] [SEP] the cat sat on a mat and dog".split()
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=16,
        num_hidden_layers=max(1, round(gib * 2**30 / 2 / (12 * width**2))),
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    with torch.device("meta"):
        model = BertModel(config)
    return write_shards(folder, "model", model)


MAKERS = {"transformers": make_llama, "diffusers": make_pipeline, "sentence_transformers": make_encoder}


def make_caches(folder: Path, kind: str, gib: float, client: Path) -> tuple[Path, int]:
    """Make the server's hub cache. Return it with the bytes of the model. `client`: receives a cache without weights."""
    server = folder / "server"
    snapshot = server / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (server / "models--org--model" / "refs").mkdir()
    (server / "models--org--model" / "refs" / "main").write_text(COMMIT)
    size = MAKERS[kind](snapshot, gib)
    shutil.copytree(server, client, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"), dirs_exist_ok=True)
    return server, size


def passed() -> int:
    """Return the bytes through the interface so far, in both directions."""
    folder = Path("/sys/class/net") / links.near_interface() / "statistics"
    return sum(int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx"))


@contextmanager
def limited(nbytes: int) -> Iterator[list[str]]:
    """Yield a command prefix that limits memory by a cgroup."""
    root = Path("/sys/fs/cgroup")
    modern = (root / "cgroup.controllers").exists()
    group = (root if modern else root / "memory") / NAME
    group.mkdir()
    try:
        (group / ("memory.max" if modern else "memory.limit_in_bytes")).write_text(str(nbytes))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[None]:
    """Mount a file system of this size at a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "djinn-far", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def client(command: list[str], kind: str, arguments: tuple[str, str, str], env: Mapping[str, str]) -> dict[str, Any]:
    """Run the program and return its result, with the bytes over the network."""
    before = passed()
    program = HEAD + PROGRAMS[kind] + TAIL
    done = subprocess.run(
        [*command, sys.executable, "-c", program, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=3600,
    )
    return json.loads(done.stdout.splitlines()[-1]) | {"bytes": passed() - before}


def run(options: argparse.Namespace, folder: Path, inside: list[str]) -> dict[str, Any]:
    """Make the model, and run the clients and the local program. Return their results.

    `inside`: command prefix for the clients' network namespace.
    """
    home = folder / "client"
    home.mkdir()
    server_cache, size = make_caches(folder, options.kind, options.gib, folder / "configured")
    limit = int(size / options.share)
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DJINN_CONFIG": os.devnull, "TQDM_DISABLE": "1"}
    env |= {"DJINN_START_TIMEOUT": str(START_SECONDS)}
    token = folder / "token"
    token.write_text("far-model-" * 4)
    token.chmod(0o600)
    flags = ("--host", links.CLIENT, "--insecure-plaintext-on-network", "--token-file", str(token))
    flags += ("--models", str(server_cache), "--published", str(folder / "published"))
    with served(*flags, folder=folder, environment=env) as server:
        with small_disk(home, limit), limited(limit) as there:
            cache = home / "cache"
            shutil.copytree(folder / "configured", cache)
            private = {
                "HOME": str(home),
                "TMPDIR": str(home),
                "XDG_CACHE_HOME": str(home / "other"),
                "DJINN_CONNECTION_FILE": str(server.file),
            }
            far = [*there, *inside, "env", f"TMPDIR={home}"]
            found = {
                way: client(far, options.kind, ("remote_accelerator:0", str(cache), way), env | private)
                for way in WAYS[options.kind]
            }
        found["local"] = client([], options.kind, ("cpu", str(server_cache), "local"), env)
    return {"kind": options.kind, "model_bytes": size, "limit_bytes": limit, **found}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(PROGRAMS), default="transformers")
    parser.add_argument("--gib", type=float, default=5.0)
    parser.add_argument("--share", type=float, default=10.0, help="the model's size by the client's memory and disk")
    parser.add_argument("--round-trip-ms", type=float, default=0.0)
    parser.add_argument("--mbit", type=float, default=0.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = tempfile.TemporaryDirectory(prefix="djinn-far-", ignore_cleanup_errors=True)
    conditions = links.Conditions(options.round_trip_ms / 1000, options.mbit * 1e6 or None)
    with folder as name, links.namespace(conditions) as inside:
        found = run(options, Path(name), inside)
        ways = [*WAYS[options.kind], "local"]
        same = all(found[way]["made"] == found["local"]["made"] for way in ways)
        few = all(found[way]["bytes"] < MOST_BYTES for way in ways)
        for way in ways:
            found[way]["made"] = found[way]["made"][:13]
        print(json.dumps(found | {"same": same}), flush=True)
    sys.exit(not (same and few))


if __name__ == "__main__":
    main()
