"""Caches that outlive `generate()`: the entries of surplus steps are removed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import attrs
import torch

from djinn_integrations.late_stop.pace import MOST

_SLACK: Final = 16  # further states that a window keeps, so that it is not cut at every step


class CacheLayer(Protocol):
    """One layer of a cache, as far as surplus steps concern it."""

    def step(self) -> None:
        """Count a step; more than `MOST` steps will never be undone."""

    def cut(self, steps: int) -> None:
        """Restore the state after the first `steps` steps; undo one more that failed half way, too."""

    def release(self) -> None:
        """Nothing will be undone any more."""


@attrs.define
class _GrowingLayer:
    """A layer that grows by concatenation. One that is not initialised shares the states of another."""

    layer: Any
    before: int  # states in it before the first step that was counted

    def step(self) -> None:
        pass

    def cut(self, steps: int) -> None:
        surplus = self.layer.get_seq_length() - self.before - steps
        if self.layer.is_initialized and surplus > 0:
            self.layer.crop(-surplus)

    def release(self) -> None:
        pass


@attrs.define
class _WindowLayer(_GrowingLayer):
    """A layer that keeps the last states only. Until `release` it keeps as many more as may be needed again."""

    def step(self) -> None:
        most = self.layer.sliding_window - 1 + MOST + 1
        if self.layer.is_initialized and self.layer.keys.shape[-2] > most + _SLACK:
            self.layer.keys = self.layer.keys[:, :, -most:, :]
            self.layer.values = self.layer.values[:, :, -most:, :]

    def release(self) -> None:
        if self.layer.is_initialized:
            self.layer.crop(0)
        self.layer.record_past = False


@attrs.define
class _FixedLayer:
    """A layer of fixed size that is written in place. What lies beyond its length is zero, and becomes so again."""

    layer: Any
    before: torch.Tensor
    taken: int = 0

    def step(self) -> None:
        self.taken += 1

    def cut(self, steps: int) -> None:
        layer = self.layer
        length = self.before + steps
        places = torch.arange(layer.max_cache_len, device=layer.device)
        # One more than was counted: a step may have failed half way.
        surplus = ((places >= length) & (places <= length + self.taken - steps))[:, None]
        layer.keys.masked_fill_(surplus, 0)
        layer.values.masked_fill_(surplus, 0)
        layer.cumulative_length.copy_(length)

    def release(self) -> None:
        pass


@attrs.define
class _EmptyLayer:
    """A layer that holds nothing."""

    def step(self) -> None:
        pass

    def cut(self, steps: int) -> None:
        pass

    def release(self) -> None:
        pass


def _growing(layer: Any) -> CacheLayer:
    return _GrowingLayer(layer, layer.get_seq_length() - 1)


def _window(layer: Any) -> CacheLayer:
    layer.activate_past_recording()
    return _WindowLayer(layer, layer.get_seq_length() - 1)


def _fixed(layer: Any) -> CacheLayer:
    return _FixedLayer(layer, layer.cumulative_length - 1) if layer.is_initialized else _EmptyLayer()


_LAYERS: Final[dict[str, Callable[[Any], CacheLayer]]] = {
    "DynamicLayer": _growing,
    "DynamicIndexedLayer": _growing,
    "DynamicSlidingWindowLayer": _window,
    "StaticLayer": _fixed,
    "DummyLayer": lambda _: _EmptyLayer(),
}
_CACHES: Final = ("Cache", "DynamicCache", "StaticCache")


def can_be_cut(cache: Any) -> bool:
    """True if entries that steps have written to `cache` can be removed again without a trace."""
    decoder = _decoder(cache)
    return (
        _name(decoder) in _CACHES
        and not getattr(decoder, "offloading", False)
        and all(_name(layer) in _LAYERS for layer in decoder.layers)
    )


class TruncatableCache:
    """A cache whose next steps are counted. It is made after its first step, which counts as well."""

    def __init__(self, cache: Any) -> None:
        self._layers = [_LAYERS[_name(layer)](layer) for layer in _decoder(cache).layers]

    def step(self) -> None:
        """A step was taken."""
        for layer in self._layers:
            layer.step()

    def cut(self, steps: int) -> None:
        """Remove what came after the first `steps` steps."""
        for layer in self._layers:
            layer.cut(steps)

    def release(self) -> None:
        """Nothing will be removed any more."""
        for layer in self._layers:
            layer.release()


def _decoder(cache: Any) -> Any:
    """The cache that grows with each token: the first of an encoder-decoder's caches."""
    return cache.self_attention_cache if _name(cache) == "EncoderDecoderCache" else cache


def _name(thing: Any) -> str:
    """The name of the object's class, if that is transformers' own; empty for all others, derived classes among them."""
    made = type(thing)
    return made.__name__ if made.__module__ == "transformers.cache_utils" else ""
