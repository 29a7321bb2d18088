"""Seed corpus: frames of clients in sessions of real programs, from admission to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

import djinn
from djinn.testing import open_session
from djinn_core.hookspecs.transports import Frame
from djinn_core.wire.messages import Goodbye, StatsRequest, decode

REMOTE = "remote_accelerator:0"
Program = Callable[[], object]


@contextmanager
def record(url: str, token: str) -> Iterator[list[Frame]]:
    """Open a session for the block. The list receives its frames."""
    djinn.shut_down()
    djinn.configure(servers=[url], token=token, disable=("local",), threads=1)
    djinn.init()
    frames: list[Frame] = []
    connection = open_session().executors.current[0].link.channel
    send = connection.send

    def keep(frame: Frame) -> None:
        if not isinstance(decode(frame.head), Goodbye | StatsRequest):
            frames.append(Frame(bytes(frame.head), [bytes(buffer) for buffer in frame.body]))
        send(frame)

    connection.send = keep
    try:
        yield frames
    finally:
        djinn.synchronize()
        connection.send = send
        djinn.shut_down()
        djinn.configure()


def llama() -> None:
    """Run prefill and a few tokens of a tiny model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=16, max_position_embeddings=64))
    model = model.eval().to(REMOTE)
    model.generate(torch.tensor([[1, 2, 3]]).to(REMOTE), max_new_tokens=4, do_sample=False, pad_token_id=0).cpu()


def training() -> None:
    """Run steps of Adam with dropout, embeddings, normalizations and two losses."""
    torch.manual_seed(3)
    layers = (
        torch.nn.Embedding(8, 6),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 6),
        torch.nn.LayerNorm(6),
        torch.nn.GELU(),
    )
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.2), torch.nn.Linear(6, 3)).to(REMOTE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tokens, labels = torch.randint(0, 8, (4, 2)).to(REMOTE), torch.randint(0, 3, (4,)).to(REMOTE)
    for _ in range(2):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        loss.item()


def images() -> None:
    """Run convolutions, poolings and batch norms, forward and backward."""
    convolution = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU())
    model = torch.nn.Sequential(convolution, torch.nn.MaxPool2d(2), torch.nn.AdaptiveAvgPool2d(1)).to(REMOTE)
    model(torch.rand(2, 2, 8, 8).to(REMOTE)).sum().backward()
    torch.nn.functional.interpolate(torch.rand(1, 1, 4, 4).to(REMOTE), scale_factor=2.0, mode="bilinear").cpu()
    torch.nn.functional.pad(torch.rand(1, 2, 4, 4).to(REMOTE), (1, 1, 2, 0), mode="reflect").cpu()


def indexing() -> None:
    """Run indexing, gathers, scatters, sorts, and data-dependent ops."""
    values = torch.arange(24.0).view(4, 6).to(REMOTE)
    rows = torch.tensor([0, 2, 3]).to(REMOTE)
    values[rows, :2].cpu()
    values.gather(1, torch.tensor([[0, 1], [2, 3]]).to(REMOTE)).cpu()
    values.index_add_(0, rows, torch.ones(3, 6).to(REMOTE))
    values.scatter_(1, torch.tensor([[0], [1]]).to(REMOTE), 5.0)
    torch.nonzero(values > 7).cpu()
    values.sort(dim=1).values.topk(2).indices.cpu()
    torch.nn.functional.embedding_bag(rows, values.T.contiguous(), torch.tensor([0, 1]).to(REMOTE)).cpu()


def views() -> None:
    """Run nested views, writes through them, and growing memory."""
    base = torch.zeros(4, 6).to(REMOTE)
    base.view(2, 12)[:, ::3].add_(1)
    base.as_strided((3, 3), (6, 2), 1).mul_(2)
    base.t().unfold(0, 2, 2).select(1, 0).fill_(7)
    base.resize_(5, 6)[1:, 2:].copy_(torch.ones(4, 4))
    torch.cat([base.flatten()[3:9], base.expand(2, 5, 6).flatten()[:4]]).cpu()
    base.split(2, dim=1)[1].cumsum(0).cpu()


def randomness() -> None:
    """Run seeds, generators and distributions."""
    torch.manual_seed(5)
    generator = torch.Generator(device=REMOTE).manual_seed(9)
    sample = torch.rand(4, device=REMOTE, generator=generator) + torch.randn(4, device=REMOTE)
    torch.multinomial(sample.softmax(0), 2, generator=generator).cpu()
    torch.randperm(7, device=REMOTE).cpu()
    torch.randint(0, 5, (3,), device=REMOTE).bernoulli_(0.5).cpu()
    sample.exponential_().uniform_(-1, 1).cpu()


def mathematics() -> None:
    """Run factorizations, transforms, lists of tensors, complex numbers."""
    square = torch.eye(3).to(REMOTE) * 2 + torch.rand(3, 3).to(REMOTE)
    torch.linalg.inv(square).cpu()
    torch.fft.rfft(square).abs().cpu()
    torch._foreach_add([square, square.t()], 1.5)[0].cpu()
    torch.einsum("ij,jk->ik", square, square).logsumexp(0).cpu()
    torch.linspace(0, 1, 5, device=REMOTE).cummax(0).indices.cpu()
    torch.nn.functional.scaled_dot_product_attention(*(torch.rand(1, 2, 3, 4).to(REMOTE) for _ in range(3))).cpu()
    torch.linalg.svd(square)[1].cpu()


PROGRAMS: tuple[Program, ...] = (views, indexing, randomness, mathematics, images, training, llama)


def sessions(url: str, token: str, programs: Sequence[Program]) -> dict[str, list[Frame]]:
    """Return the frames of each program."""
    results = {}
    for program in programs:
        with record(url, token) as frames:
            program()
        results[program.__name__] = frames
    return results
