"""Caches that outlive `generate()`: removal of the entries of surplus steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import attrs
import torch

from djinn_integrations.late_stop.pace import MOST

_SLACK: Final = 16  # additional states of a window, so that it is not cut at every step


class CacheLayer(Protocol):
    """A layer of a cache, with the operations to undo surplus steps."""

    def step(self) -> None:
        """Count a step; more than `MOST` steps will never be undone."""

    def cut(self, steps: int) -> None:
        """Restore the state after the first `steps` steps. Also undo a further step that failed half way."""

    def release(self) -> None:
        """End the counting: no later step will be undone."""


@attrs.define
class _GrowingLayer:
    """A cache layer that grows by concatenation. An uninitialised layer shares the states of another layer."""

    layer: Any
    before: int  # states before the first counted step

    def step(self) -> None:
        pass

    def cut(self, steps: int) -> None:
        surplus = self.layer.get_seq_length() - self.before - steps
        if self.layer.is_initialized and surplus > 0:
            self.layer.crop(-surplus)
            for name, states in vars(self.layer).items():
                if isinstance(states, torch.Tensor):  # a view: copy it, to have the strides of `cat`
                    setattr(self.layer, name, states.clone(memory_format=torch.contiguous_format))

    def release(self) -> None:
        pass


@attrs.define
class _WindowLayer:
    """A cache layer that keeps only the last states.

    Until `release` it keeps the additional states that a cut may need.
    """

    layer: Any
    before: int  # states before the first counted step
    joined: int  # states that the first counted step joined by `cat`; the layer keeps a view of the last of them

    def step(self) -> None:
        most = self.layer.sliding_window - 1 + MOST + 1
        if self.layer.is_initialized and self.layer.keys.shape[-2] > most + _SLACK:
            self._change(lambda states: states[:, :, -most:, :])

    def cut(self, steps: int) -> None:
        surplus = self.layer.get_seq_length() - self.before - steps
        if self.layer.is_initialized and surplus > 0:
            self._change(lambda states: states[:, :, :-surplus, :])
            self.layer.cumulative_length -= surplus

    def release(self) -> None:
        length, window = self.layer.get_seq_length(), self.layer.sliding_window
        joined = self.joined if length - self.before == 1 else min(length, window)
        if self.layer.is_initialized:
            self._change(lambda states: _joined(states, joined)[:, :, -window + 1 :, :])
        self.layer.record_past = False

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.layer.keys, self.layer.values = change(self.layer.keys), change(self.layer.values)


def _joined(states: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last `count` states in the layout of a `cat`. Zeros replace states that the layer no longer keeps."""
    last = states[:, :, -count:, :]
    if last.shape[-2] == count and last.nbytes == last.untyped_storage().nbytes():
        return last
    batch, heads, kept, width = last.shape
    return torch.cat([last.new_zeros(batch, heads, count - kept, width), last], dim=-2)


@attrs.define
class _FixedLayer:
    """A cache layer of fixed size that is written in place.

    Elements beyond its length are zero, and a cut zeroes them again.
    """

    layer: Any
    before: torch.Tensor
    taken: int = 0

    def step(self) -> None:
        self.taken += 1

    def cut(self, steps: int) -> None:
        layer = self.layer
        length = self.before + steps
        places = torch.arange(layer.max_cache_len, device=layer.device)
        # One more than the count: a step may have failed half way.
        surplus = ((places >= length) & (places <= length + self.taken - steps))[:, None]
        layer.keys.masked_fill_(surplus, 0)
        layer.values.masked_fill_(surplus, 0)
        layer.cumulative_length.copy_(length)

    def release(self) -> None:
        pass


@attrs.define
class _EmptyLayer:
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
    keys = layer.keys
    joined = keys.untyped_storage().nbytes() * keys.shape[-2] // keys.nbytes if layer.is_initialized else 0
    return _WindowLayer(layer, layer.get_seq_length() - 1, joined)


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
    """Return True if entries of surplus steps can be removed from `cache` exactly."""
    decoder = _decoder(cache)
    return (
        _name(decoder) in _CACHES
        and not getattr(decoder, "offloading", False)
        and all(_name(layer) in _LAYERS for layer in decoder.layers)
    )


class TruncatableCache:
    """A cache with counted steps. Create it after the cache's first step, which counts as well."""

    def __init__(self, cache: Any) -> None:
        self._layers = [_LAYERS[_name(layer)](layer) for layer in _decoder(cache).layers]

    def step(self) -> None:
        """Count a step."""
        for layer in self._layers:
            layer.step()

    def cut(self, steps: int) -> None:
        """Remove the entries after the first `steps` steps."""
        for layer in self._layers:
            layer.cut(steps)

    def release(self) -> None:
        """End the counting: no later entry will be removed."""
        for layer in self._layers:
            layer.release()


def _decoder(cache: Any) -> Any:
    """Return the cache that grows with each token: the first cache of an encoder-decoder."""
    return cache.self_attention_cache if _name(cache) == "EncoderDecoderCache" else cache


def _name(thing: Any) -> str:
    """Return the class name of an object if the class is transformers' own; empty for other classes, including derived classes."""
    cls = type(thing)
    return cls.__name__ if cls.__module__ == "transformers.cache_utils" else ""
