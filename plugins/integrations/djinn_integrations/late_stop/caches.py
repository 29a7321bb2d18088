"""Removal of the entries of surplus steps from caches that outlive `generate()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import attrs
import torch

from djinn_integrations.late_stop.pace import MAX_STEPS

_SLACK: Final = 16  # additional states of a window, so that it is not cut at every step


class CacheLayer(Protocol):
    """A layer of a cache whose last steps can be undone."""

    def step(self) -> None:
        """Count a step. At most the last `MAX_STEPS` steps will be undone."""

    def cut(self, steps: int) -> None:
        """Restore the state after the first `steps` steps. Also undo a further step that failed before its end."""

    def release(self) -> None:
        """End the counting. No counted step will be undone any more."""


@attrs.define
class _GrowingLayer:
    """A cache layer that grows by concatenation. `cut` skips an uninitialised layer, which shares another layer's states."""

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
    """A cache layer that keeps only the last states (sliding window).

    Until `release`, it also keeps the earlier states that `cut` may need.
    """

    layer: Any
    before: int  # states before the first counted step
    joined: int  # number of states that the first counted step joined by `cat`, of which the layer has a view

    def step(self) -> None:
        most = self.layer.sliding_window - 1 + MAX_STEPS + 1
        if self.layer.is_initialized and self.layer.keys.shape[-2] > most + _SLACK:
            self._change(lambda states: states[:, :, -most:, :])

    def cut(self, steps: int) -> None:
        surplus = self.layer.get_seq_length() - self.before - steps
        if self.layer.is_initialized and surplus > 0:
            self._change(lambda states: states[:, :, :-surplus, :])
            self.layer.cumulative_length -= surplus

    def release(self) -> None:
        length, window = self.layer.get_seq_length(), self.layer.sliding_window
        joined_count = self.joined if length - self.before == 1 else min(length, window)
        if self.layer.is_initialized:
            self._change(lambda states: _last_states(states, joined_count)[:, :, -window + 1 :, :])
        self.layer.record_past = False

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.layer.keys, self.layer.values = change(self.layer.keys), change(self.layer.values)


def _last_states(states: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last `count` states in the memory layout of a `cat`. Zeros replace states that `states` no longer has."""
    last = states[:, :, -count:, :]
    if last.shape[-2] == count and last.nbytes == last.untyped_storage().nbytes():
        return last
    batch, heads, kept_count, width = last.shape
    return torch.cat([last.new_zeros(batch, heads, count - kept_count, width), last], dim=-2)


@attrs.define
class _FixedLayer:
    """A cache layer of fixed size that is written in place.

    Elements beyond its length are zero. `cut` sets the elements of surplus steps to zero.
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
    joined_count = keys.untyped_storage().nbytes() * keys.shape[-2] // keys.nbytes if layer.is_initialized else 0
    return _WindowLayer(layer, layer.get_seq_length() - 1, joined_count)


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
    """Return True if the entries of surplus steps can be removed from `cache` without a trace."""
    decoder = _decoder(cache)
    return (
        _name(decoder) in _CACHES
        and not getattr(decoder, "offloading", False)
        and all(_name(layer) in _LAYERS for layer in decoder.layers)
    )


class TruncatableCache:
    """Counts the steps of a cache, so that surplus steps can be undone.

    Create it after the cache's first step, which is counted.
    """

    def __init__(self, cache: Any) -> None:
        self._layers = [_LAYERS[_name(layer)](layer) for layer in _decoder(cache).layers]

    def step(self) -> None:
        """Count a step."""
        for layer in self._layers:
            layer.step()

    def cut(self, steps: int) -> None:
        """Remove the entries of all steps after the first `steps` steps."""
        for layer in self._layers:
            layer.cut(steps)

    def release(self) -> None:
        """End the counting. No entry will be removed any more."""
        for layer in self._layers:
            layer.release()


def _decoder(cache: Any) -> Any:
    """Return the cache that grows with each token: `cache`, or the self-attention cache of an encoder-decoder cache."""
    return cache.self_attention_cache if _name(cache) == "EncoderDecoderCache" else cache


def _name(thing: Any) -> str:
    """Return the class name of an object if transformers defines the class, or an empty string for other classes."""
    cls = type(thing)
    return cls.__name__ if cls.__module__ == "transformers.cache_utils" else ""
