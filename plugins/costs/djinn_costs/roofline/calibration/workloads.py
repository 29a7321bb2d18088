"""Programs that validate predictions. Each takes a millisecond or more. Calibration uses other programs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import nn

Step = Callable[[], object]


@attrs.frozen
class Workload:
    """A program to predict.

    Attributes:
        name: name of the program.
        build: creates the model on a device, and returns a function that runs one step.
    """

    name: str
    build: Callable[[torch.device], Step]


def workloads() -> Iterator[Workload]:
    """Yield all programs that can run here. Some need the package transformers."""
    for width, length in ((64, 16), (128, 64), (256, 128)):
        yield Workload(f"LSTM, {width} wide, {length} long", _recurrent(width, length))
    for width, batch in ((128, 32), (512, 64), (1024, 256)):
        yield Workload(f"training an MLP, {width} wide, batch {batch}", _perceptron(width, batch))
    for channels, side in ((8, 32), (16, 64)):
        yield Workload(f"training a CNN, {channels} channels, {side}x{side}", _convolutional(channels, side))
    if importlib.util.find_spec("transformers") is not None:
        yield from _language_models()
        yield from _vision_models()


def _language_models() -> Iterator[Workload]:
    sizes = ((2, 64, 1, 16), (2, 128, 2, 32), (4, 256, 2, 64), (4, 512, 4, 128), (6, 768, 4, 128))
    for layers, width, batch, length in sizes:
        label = f"{layers} layers, {width} wide, {batch}x{length}"
        yield Workload(f"GPT-2, {label}", _gpt2(layers, width, batch, length))
        yield Workload(f"BERT, {label}", _bert(layers, width, batch, length))
    for layers, width, length in ((2, 128, 32), (4, 512, 256), (6, 768, 128)):
        yield Workload(
            f"GPT-2 decoding, {layers} layers, {width} wide, {length} before", _decoding(layers, width, length)
        )
    for layers, width, batch, length in ((2, 64, 2, 32), (2, 128, 4, 64), (4, 256, 4, 64)):
        label = f"{layers} layers, {width} wide, {batch}x{length}"
        yield Workload(f"training GPT-2, {label}", _training_gpt2(layers, width, batch, length))
    for layers, width, length in ((2, 64, 16), (2, 256, 32)):
        yield Workload(f"Mamba, {layers} layers, {width} wide, {length} long", _mamba(layers, width, length))


def _vision_models() -> Iterator[Workload]:
    for sizes, depths, batch, side in (
        ([16, 32], [1, 1], 1, 64),
        ([32, 64, 128], [2, 2, 2], 2, 96),
        ([64, 128, 256], [2, 2, 2], 2, 160),
    ):
        yield Workload(f"ResNet, {sizes[-1]} channels, {batch}x{side}x{side}", _resnet(sizes, depths, batch, side))
    for layers, width, batch, side in ((2, 96, 1, 64), (4, 192, 2, 96), (6, 384, 4, 160)):
        yield Workload(f"ViT, {layers} layers, {width} wide, {batch}x{side}x{side}", _vit(layers, width, batch, side))


def _inferring(model: nn.Module, device: torch.device, **inputs: torch.Tensor) -> Step:
    model = model.eval().to(device)
    arguments = {name: tensor.to(device) for name, tensor in inputs.items()}

    def step() -> object:
        with torch.no_grad():
            return model(**arguments)

    return step


def _training(model: nn.Module, loss: Callable[[], torch.Tensor], *, adam: bool) -> Step:
    parameters = model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-4) if adam else torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def step() -> None:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss().backward()
        optimizer.step()

    return step


def _recurrent(width: int, length: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        return _inferring(nn.LSTM(width, width, 2), device, input=torch.rand(length, 8, width))

    return build


def _perceptron(width: int, batch: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 10)]
        model = nn.Sequential(*layers).to(device)
        x, y = torch.rand(batch, width).to(device), torch.randint(0, 10, (batch,)).to(device)
        return _training(model, lambda: nn.functional.cross_entropy(model(x), y), adam=True)

    return build


def _convolutional(channels: int, side: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        model = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * (side // 4) ** 2, 10),
        ).to(device)
        x, y = torch.rand(8, 3, side, side).to(device), torch.randint(0, 10, (8,)).to(device)
        return _training(model, lambda: nn.functional.cross_entropy(model(x), y), adam=False)

    return build


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 1000, (batch, length))


def _gpt2_model(layers: int, width: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    heads = max(2, width // 64)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=1000))


def _gpt2(layers: int, width: int, batch: int, length: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        return _inferring(_gpt2_model(layers, width), device, input_ids=_tokens(batch, length))

    return build


def _decoding(layers: int, width: int, length: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        from transformers import DynamicCache

        model = _gpt2_model(layers, width).eval().to(device)
        prompt, token = _tokens(1, length).to(device), _tokens(1, 1).to(device)
        with torch.no_grad():
            past = model(input_ids=prompt, use_cache=True).past_key_values
        layers_before = [(layer.keys, layer.values) for layer in past.layers]

        def step() -> object:
            with torch.no_grad():
                return model(input_ids=token, past_key_values=DynamicCache(layers_before)).logits

        return step

    return build


def _training_gpt2(layers: int, width: int, batch: int, length: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        model, tokens = _gpt2_model(layers, width).train().to(device), _tokens(batch, length).to(device)
        return _training(model, lambda: model(input_ids=tokens, labels=tokens).loss, adam=True)

    return build


def _bert(layers: int, width: int, batch: int, length: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        from transformers import BertConfig, BertModel

        heads = max(2, width // 64)
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads}
        config = BertConfig(num_hidden_layers=layers, vocab_size=1000, **sizes)
        return _inferring(BertModel(config), device, input_ids=_tokens(batch, length))

    return build


def _mamba(layers: int, width: int, length: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        from transformers import MambaConfig, MambaModel

        config = MambaConfig(hidden_size=width, num_hidden_layers=layers, vocab_size=1000)
        return _inferring(MambaModel(config), device, input_ids=_tokens(1, length))

    return build


def _resnet(sizes: list[int], depths: list[int], batch: int, side: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        from transformers import ResNetConfig, ResNetModel

        config = ResNetConfig(embedding_size=sizes[0], hidden_sizes=sizes, depths=depths, layer_type="basic")
        return _inferring(ResNetModel(config), device, pixel_values=torch.rand(batch, 3, side, side))

    return build


def _vit(layers: int, width: int, batch: int, side: int) -> Callable[[torch.device], Step]:
    def build(device: torch.device) -> Step:
        from transformers import ViTConfig, ViTModel

        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": max(2, width // 64)}
        config = ViTConfig(num_hidden_layers=layers, image_size=side, patch_size=16, **sizes)
        return _inferring(ViTModel(config), device, pixel_values=torch.rand(batch, 3, side, side))

    return build
