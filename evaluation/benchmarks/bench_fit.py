"""Memory need predicted by `djinn plan`, against the peak of an executor that runs the model.

    python -m evaluation fit [--json FILE] [--only llama] [--small]

Each model is planned as users do: from its `config.json`, for a server. Then it runs there with weights: `generate()`,
a loop of evaluations, or a loop of training steps. The server's device is `counted` (counted_cpu.py). It measures the
peak bytes of tensors and of PyTorch's allocator together, including temporaries inside of ops, as
`torch.cuda.max_memory_allocated` does. Other memory of the process (libraries, oneDNN's own memory, fragmentation) is
not included.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from djinn_core.registry.discovery import installed
from evaluation.benchmarks.serving import connected_by_file

HERE = Path(__file__).resolve().parent
DEVICE = "remote_accelerator:0"
BAR = 1.1  # maximum ratio of predicted to measured bytes; the minimum is 1

TEXT = {"vocab_size": 2000, "bos_token_id": 1, "eos_token_id": 2}
DECODER = TEXT | {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}  # fmt: skip
ENCODER = TEXT | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
GPT2 = TEXT | {"n_embd": 256, "n_layer": 4, "n_head": 4}
STAGES = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
IMAGES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}


@attrs.frozen
class Case:
    """A transformers model (module, class and settings), and its use in terms of `djinn plan`.

    `step`: kind of use. `new`: number of generated tokens.
    """

    module: str
    model: str
    config: str
    settings: Mapping[str, Any]
    step: str
    batch: int
    tokens: int = 128
    new: int = 1
    optimizer: str = "adamw"
    dtype: str = ""

    @property
    def options(self) -> list[str]:
        """Options of `djinn plan` for this use."""
        description = {"step": self.step, "batch": self.batch, "tokens": self.tokens, "dtype": self.dtype}
        if self.step == "decode":
            description["new-tokens"] = self.new
        if self.step == "train":
            description["optimizer"] = self.optimizer
        return [text for name, value in description.items() if value for text in (f"--{name}", str(value))]

    def build(self) -> tuple[torch.nn.Module, Any]:
        """Return the model with random weights, and its configuration."""
        package = f"transformers.models.{self.module}"
        config = getattr(importlib.import_module(f"{package}.configuration_{self.module}"), self.config)(
            **self.settings
        )
        config.architectures = [self.model]
        model = getattr(importlib.import_module(f"{package}.modeling_{self.module}"), self.model)(config)
        return (model.to(getattr(torch, self.dtype)) if self.dtype else model), config


def case(module: str, prefix: str, head: str, settings: Mapping[str, Any], step: str, batch: int, **more: Any) -> Case:
    """Return a case whose classes have the usual names."""
    return Case(module, f"{prefix}{head}", f"{prefix}Config", settings, step, batch, **more)


CAUSAL = "ForCausalLM"
CASES = {
    "llama, batch 1": case("llama", "Llama", CAUSAL, DECODER, "decode", 1, tokens=32, new=16),
    "llama, batch 8": case("llama", "Llama", CAUSAL, DECODER, "decode", 8, tokens=256, new=16),
    "llama, long context": case("llama", "Llama", CAUSAL, DECODER, "decode", 2, tokens=900, new=8),
    "llama, bfloat16": case("llama", "Llama", CAUSAL, DECODER, "decode", 4, tokens=256, new=8, dtype="bfloat16"),
    "qwen3": case("qwen3", "Qwen3", CAUSAL, DECODER | {"head_dim": 64}, "decode", 4, tokens=128, new=8),
    "mistral": case("mistral", "Mistral", CAUSAL, DECODER | {"sliding_window": 64}, "decode", 4, tokens=128, new=8),
    "gpt2": case("gpt2", "GPT2", "LMHeadModel", GPT2, "decode", 4, tokens=128, new=16),
    "gpt_neox": case("gpt_neox", "GPTNeoX", CAUSAL, ENCODER, "decode", 4, tokens=128, new=8),
    "olmo2": case("olmo2", "Olmo2", CAUSAL, DECODER, "decode", 4, tokens=128, new=8),
    "bert": case("bert", "Bert", "ForMaskedLM", ENCODER, "forward", 8),
    "roberta": case("roberta", "Roberta", "ForSequenceClassification", ENCODER, "forward", 16),
    "distilbert": case("distilbert", "DistilBert", "ForMaskedLM", TEXT | {"dim": 256, "n_layers": 4, "n_heads": 4, "hidden_dim": 1024}, "forward", 8),
    "vit": case("vit", "ViT", "ForImageClassification", IMAGES, "forward", 8),
    "resnet": case("resnet", "ResNet", "ForImageClassification", STAGES | {"embedding_size": 32}, "forward", 8),
    "convnext": case("convnext", "ConvNext", "ForImageClassification", STAGES | {"image_size": 224}, "forward", 4),
    "mobilenet_v2": case("mobilenet_v2", "MobileNetV2", "ForImageClassification", {}, "forward", 4),
    "mobilenet_v2, SGD": case("mobilenet_v2", "MobileNetV2", "ForImageClassification", {}, "train", 2, optimizer="sgd"),
    "llama, AdamW": case("llama", "Llama", CAUSAL, DECODER, "train", 4),
    "gpt2, SGD": case("gpt2", "GPT2", "LMHeadModel", GPT2, "train", 4, optimizer="sgd"),
    "bert, AdamW": case("bert", "Bert", "ForMaskedLM", ENCODER, "train", 4),
    "vit, AdamW": case("vit", "ViT", "ForImageClassification", IMAGES, "train", 4),
    "resnet, SGD": case("resnet", "ResNet", "ForImageClassification", STAGES | {"embedding_size": 32}, "train", 4, optimizer="sgd"),
    "convnext, AdamW": case("convnext", "ConvNext", "ForImageClassification", STAGES | {"image_size": 224}, "train", 2),
    "llama, bfloat16, Adam": case("llama", "Llama", CAUSAL, DECODER, "train", 4, optimizer="adam", dtype="bfloat16"),
}  # fmt: skip
SHORT = ("llama, batch 1", "resnet", "gpt2, SGD")


@attrs.frozen
class Prediction:
    """A figure that `djinn plan` predicted, and its measured value."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Return predicted divided by measured."""
        return self.predicted / self.measured


@attrs.frozen
class Memory(Prediction):
    """Predicted and measured bytes, and the parts of the prediction."""

    parts: Mapping[str, int]
    seconds: float


@contextlib.contextmanager
def counting() -> Iterator[Path]:
    """Run a server with a counting device, with this process as its client. Yield the connection file."""
    plugins = sorted({plugin.name for plugin in installed()})
    environment = {
        "DJINN_CONFIG": os.devnull, "DJINN_PLUGINS": ",".join([*plugins, "counted_cpu"]), "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    with connected_by_file(device="counted", environment=environment) as file:
        yield file


def predicted(config: Any, one: Case, connection_file: Path) -> Mapping[str, Any]:
    """Return the output of `djinn plan --json` for a configuration."""
    from click.testing import CliRunner

    from djinn_commands.planning.plan_command import plan as command

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        arguments = [folder, "--connection-file", str(connection_file), "--json", *one.options]
        answer = CliRunner().invoke(command, arguments, catch_exceptions=False)
    return json.loads(answer.stdout)


def inputs_of(model: torch.nn.Module, one: Case) -> dict[str, torch.Tensor]:
    """Return inputs on the device, as users make them."""
    dtype = getattr(torch, one.dtype or "float32")
    if model.main_input_name == "pixel_values":
        results = {"pixel_values": torch.rand(one.batch, 3, 224, 224, dtype=dtype)}
    else:
        results = {"input_ids": torch.randint(3, 1999, (one.batch, one.tokens))}
        if one.step == "train":
            results["labels"] = results["input_ids"]
    return {name: value.to(DEVICE) for name, value in results.items()}


def run(model: torch.nn.Module, one: Case) -> None:
    """Use the model as the case describes: generate, evaluate or train."""
    model.to(DEVICE).train(one.step == "train")
    inputs = inputs_of(model, one)
    if one.step == "decode":
        model.generate(**inputs, max_new_tokens=one.new, min_new_tokens=one.new, do_sample=False).cpu()
    elif one.step == "forward":
        for _ in range(3):
            with torch.no_grad():
                output = model(**inputs)
            output.logits.cpu()
    else:
        kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
        optimizer = kinds[one.optimizer](model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            output = model(**inputs)
            loss = output.loss if output.loss is not None else output.logits.float().mean()
            loss.backward()
            optimizer.step()
            loss.item()


def measure(one: Case) -> Memory:
    """Plan a model, then run it."""
    start = time.perf_counter()
    torch.manual_seed(0)
    with counting() as file:
        model, config = one.build()
        report = predicted(config, one, file)
        run(model, one)
        most = int(torch.remote_accelerator.max_memory_allocated())
    return Memory(report["needed"], most, report["memory"], time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--only", default="", help="run only models whose names contain this text")
    parser.add_argument("--small", action="store_true", help=f"three models: {'; '.join(SHORT)}")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DJINN_CONFIG": os.devnull}
    torch.set_num_threads(1)
    names = [name for name in CASES if options.only in name and (name in SHORT or not options.small)]
    results = {}
    print("| model | step | predicted | measured | ratio |\n| --- | --- | --- | --- | --- |", flush=True)
    for name in names:
        one = CASES[name]
        results[name] = result = measure(one)
        sizes = (f"{size / (1 << 20):.1f} MiB" for size in (result.predicted, result.measured))
        text = " ".join(one.options).replace("--", "").replace("step ", "")
        print(f"| {name} | {text} | {' | '.join(sizes)} | {result.ratio:.3f} |", flush=True)
    good = [1 <= result.ratio <= BAR for result in results.values()]
    print(f"\n{sum(good)} of {len(good)} within {BAR - 1:.0%} and not below")
    if options.json:
        rows = {name: attrs.asdict(result) | {"ratio": result.ratio} for name, result in results.items()}
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
