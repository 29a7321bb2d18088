"""Small programs that can run, for tests that compare numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from djinn_profiler.captured import Captured, capture


def sample_programs() -> Mapping[str, Captured]:
    """Return programs by name, such as a perceptron, attention, a convolution, a decode step and a training step."""
    makers: tuple[Callable[[], Captured], ...] = (
        perceptron,
        projections,
        attention,
        convolution,
        decoding,
        training,
    )
    return {maker.__name__: maker() for maker in makers}


def _capture_call(model: torch.nn.Module, *inputs: torch.Tensor) -> Captured:
    """Record a call of a module in evaluation mode. Model and inputs are on the meta device."""
    model.eval()
    with capture() as captured, torch.no_grad():
        out = model(*inputs)
    del out  # it was held when the program ended, so it is a result
    return captured


def perceptron() -> Captured:
    """Record two linear layers with a ReLU between them."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        return _capture_call(model, torch.zeros(4, 8))


class _Projections(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the three outputs, each with its own scale."""
        mixed: torch.Tensor = self.query(x) + 2 * self.key(x) + 3 * self.value(x)
        return mixed


def projections() -> Captured:
    """Record three linear layers that read one input."""
    with torch.device("meta"):
        return _capture_call(_Projections(), torch.zeros(1, 8))


def attention() -> Captured:
    """Record a transformer layer: attention, normalisation, residual connections and a feed-forward network."""
    with torch.device("meta"):
        return _capture_call(
            torch.nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)
        )


def convolution() -> Captured:
    """Record a convolution, a batch normalisation with running statistics, and a ReLU."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        return _capture_call(model, torch.zeros(2, 3, 6, 6))


class _Decoding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(2, 8), torch.nn.Linear(8, 2, bias=False)

    def forward(self, token: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the logits after one token. The cache of keys and values grows by this token."""
        x = self.table(token)[:, None]
        keys, values = torch.cat([keys, x], dim=2), torch.cat([values, 2 * x], dim=2)
        attended = torch.nn.functional.scaled_dot_product_attention(x, keys, values)
        logits: torch.Tensor = self.head(attended)
        return logits


def decoding() -> Captured:
    """Record the generation of one token with a cache of keys and values."""
    with torch.device("meta"):
        token, cache = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 5, 8)
        return _capture_call(_Decoding(), token, cache, cache.clone())


def training() -> Captured:
    """Record a training step of a perceptron: forward, backward and stochastic gradient descent."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        x = torch.zeros(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with capture() as captured:
        model(x).square().mean().backward()
        optimizer.step()
    return captured
