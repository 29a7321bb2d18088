"""The programs of `bench_varying.py`: each trains or infers on tensors with changing sizes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch.nn import functional

Size = tuple[int, ...]
Step = Callable[[Size], torch.Tensor]
ANCHORS, CLASSES, WORDS = 8, 3, 500


@attrs.frozen
class Program:
    """A program with many sizes.

    Attributes:
        start: function that moves the program to a device and returns a step, from a size to a printable result.
        sizes: all sizes.
        fixed: the size for runs with one size.
        usual: size of nine steps in ten, for programs in which only the last batch of an epoch differs, or None.
        fetched: number of steps after which a result is fetched.
    """

    name: str
    start: Callable[[str], Step]
    sizes: tuple[Size, ...]
    fixed: Size
    usual: Size | None = None
    fetched: int = 10

    def halves(self, known: int) -> tuple[list[Size], list[Size]]:
        """Return half of the sizes, at most `known`, for the first steps. Return the other half for later steps."""
        mixed = list(self.sizes)
        random.Random(0).shuffle(mixed)
        return mixed[::2][:known], mixed[1::2]

    def drawn(self, among: Sequence[Size], seed: int) -> Iterator[Size]:
        """Yield random sizes out of `among` without end. If the program has a usual size, it is nine of ten."""
        draw = random.Random(seed)
        for number in itertools.count(1):
            yield self.usual if self.usual and number % 10 else draw.choice(among)


def _numbers() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _training(model: torch.nn.Module, device: str, loss_of: Callable[[Size], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.to(device).train().parameters(), lr=1e-3)

    def step(size: Size) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(size)
        loss.backward()
        optimizer.step()
        return loss

    return step


def encoder(device: str) -> Step:
    """Run three layers of width 32, batch 4, with varying length."""
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(3)]
    model, numbers = torch.nn.Sequential(*layers), _numbers()
    return _training(
        model, device, lambda size: model(torch.randn(4, *size, 32, generator=numbers).to(device)).square().mean()
    )


class Block(torch.nn.Module):
    """A GPT layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mixed, self.joined = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mixed(self.before(x)).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        visited = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(visited.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class Gpt(torch.nn.Module):
    """A hand-written GPT of four layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(WORDS, width), torch.nn.Embedding(128, width)
        self.blocks = torch.nn.ModuleList(Block(width, 4) for _ in range(4))
        self.last, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, WORDS, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        x = self.words(given) + self.places(torch.arange(given.shape[1], device=given.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def gpt(device: str) -> Step:
    """Train a small GPT with varying batch and length."""
    torch.manual_seed(0)
    model, numbers = Gpt(), _numbers()

    def loss_of(size: Size) -> torch.Tensor:
        words = torch.randint(0, WORDS, (size[0], size[1] + 1), generator=numbers).to(device)
        return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    return _training(model, device, loss_of)


def _convolutions() -> torch.nn.Sequential:
    sides = itertools.pairwise((3, 8, 16, 32))
    parts = [
        (torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.BatchNorm2d(b), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
        for a, b in sides
    ]
    return torch.nn.Sequential(*itertools.chain(*parts))


def _overlaps(these: torch.Tensor, those: torch.Tensor) -> torch.Tensor:
    low, high = torch.maximum(these[:, None, :2], those[:, :2]), torch.minimum(these[:, None, 2:], those[:, 2:])
    common = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (these, those)]
    return common / (areas[0][:, None] + areas[1] - common)


def detection(device: str) -> Step:
    """Train on two images of one size with varying numbers of boxes; every cell of the last map predicts a box and a class."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(_convolutions(), torch.nn.Conv2d(32, 4 + CLASSES, 1))
    numbers = _numbers()
    corner = torch.arange(ANCHORS) / ANCHORS
    corners = torch.stack(torch.meshgrid(corner, corner, indexing="ij"), -1).flatten(0, 1)
    anchors = torch.cat([corners, corners + 1 / ANCHORS], 1).to(device)

    def loss_of(size: Size) -> torch.Tensor:
        images = torch.rand(len(size), 3, 8 * ANCHORS, 8 * ANCHORS, generator=numbers).to(device)
        return torch.stack([_of_image(guess, count) for guess, count in zip(model(images), size, strict=True)]).sum()

    def _of_image(guess: torch.Tensor, count: int) -> torch.Tensor:
        low = torch.rand(count, 2, generator=numbers) * 0.6
        boxes = torch.cat([low, low + 0.1 + torch.rand(count, 2, generator=numbers) * 0.3], 1).to(device)
        labels = torch.randint(1, CLASSES, (count,), generator=numbers).to(device)
        overlap, which = _overlaps(anchors, boxes).max(1)
        result = overlap > 0.1
        guess = guess.flatten(1).T
        classes = functional.cross_entropy(guess[:, 4:], torch.where(result, labels[which], 0))
        places = functional.smooth_l1_loss(anchors + guess[:, :4], boxes[which], reduction="none").sum(1)
        return classes + (places * result).sum() / count

    return _training(model, device, loss_of)


def convolution(device: str) -> Step:
    """Train a small convolutional network, batch 4, with varying height and width."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        _convolutions(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10)
    )
    numbers = _numbers()

    def loss_of(size: Size) -> torch.Tensor:
        images = torch.rand(4, 3, *size, generator=numbers).to(device)
        return functional.cross_entropy(model(images), torch.randint(0, 10, (4,), generator=numbers).to(device))

    return _training(model, device, loss_of)


def _inference(model: torch.nn.Module, device: str, of: Callable[[object], torch.Tensor]) -> Step:
    model, numbers = model.eval().to(device), _numbers()

    @torch.no_grad()
    def step(size: Size) -> torch.Tensor:
        words = torch.randint(0, WORDS, size, generator=numbers).to(device)
        return of(model(input_ids=words, attention_mask=torch.ones(size, dtype=torch.long).to(device)))

    return step


def bert(device: str) -> Step:
    """Run a forward pass of BERT (six layers of width 128) with varying batch and length."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=128, num_hidden_layers=6, num_attention_heads=4, intermediate_size=256
    )
    return _inference(BertModel(config), device, lambda out: out.last_hidden_state.mean(1))


def llama(device: str) -> Step:
    """Predict the next token with a small Llama, with varying batch and length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
    )
    return _inference(LlamaForCausalLM(config), device, lambda out: out.logits[:, -1].argmax(-1))


_WORDS_OF_BATCHES = tuple(itertools.product(range(1, 9), range(5, 120)))
ENCODER = Program("encoder", encoder, tuple((length,) for length in range(5, 120)), (64,))
PROGRAMS = (
    ENCODER,
    Program("gpt_length", gpt, tuple((4, length) for length in range(5, 120)), (4, 64)),
    Program("gpt_batch", gpt, tuple((batch, 32) for batch in range(1, 49)), (8, 32)),
    Program("gpt_last_batch", gpt, tuple((batch, 32) for batch in range(1, 48)), (48, 32), usual=(48, 32)),
    Program("detection", detection, tuple(itertools.product(range(1, 25), repeat=2)), (8, 8)),
    Program("convolution", convolution, tuple(itertools.product(range(24, 65), repeat=2)), (48, 48)),
    Program("bert", bert, _WORDS_OF_BATCHES, (4, 64), fetched=1),
    Program("llama", llama, _WORDS_OF_BATCHES, (4, 64), fetched=1),
)
