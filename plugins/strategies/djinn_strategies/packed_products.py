"""A run strategy of CPUs: products with weights that nothing writes, from copies in oneDNN's layout. They round in another way than the ops."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch

from djinn_core import torch_private
from djinn_core.hookspecs import hookimpl
from djinn_server.hookspecs.run_strategies import RunOffer, RunStrategy, StrategyContext, StrategyRun, TemplateFacts
from djinn_server.running.arbiter import ServedFacts, ServedRun
from djinn_server.running.input_aliases import aliases_of
from djinn_server.running.own_operators import OwnOperators
from djinn_server.running.values import strided
from djinn_strategies.batching.joined_runs import is_plain
from djinn_strategies.batching.products import PRODUCTS, Product, find_products
from djinn_strategies.batching.weights import PackedWeights, WeightPlace, place_of

djinn_api_version = "2.0"


class PackedProducts(RunStrategy):
    """Compute products from packed copies of their weights. The arbiter measures whether that is faster.

    Attributes:
        packed: the copies.
    """

    name = "packed_products"
    exact = False
    packed: PackedWeights
    _own: OwnOperators

    def begin(self, context: StrategyContext) -> bool:
        """Return True on a CPU on which nothing is evicted and no sessions are joined, as `RunStrategy.begin` does."""
        device = context.device
        self._own, self.packed = device.own, PackedWeights(device.runtime)
        return bool(device.is_plain)

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return an offer for a template with products of inputs that it does not write."""
        if not isinstance(template, ServedFacts):
            return None
        compiled, aliases = template.template, aliases_of(template.template, self._own)
        products, first = find_products(compiled, aliases), len(compiled.constants) + compiled.slots
        return PackedOffer(self, products, tuple([first + at for at in aliases.written])) if products else None

    def before_write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Free the copies of weights that are written, as `RunStrategy.before_write` does."""
        self.packed.writing(tensors)

    def copy_of(
        self, weight: torch.Tensor, product: Product, rows: int, user: PackedOffer, written: Container[int]
    ) -> torch.Tensor | None:
        """Return the packed copy of a weight; None at the first sight of it, or if it cannot be packed."""
        storage, packed = weight.untyped_storage(), self.packed.get(weight)
        if packed is None and storage in user.seen and torch_private.storage_key(weight) not in written:
            packed = self.packed.pack(weight, product.transposed, rows, user)
            user.packed.add(place_of(weight))
        user.seen[storage] = None
        return packed

    def drop(self, user: PackedOffer) -> None:
        """Free the copies that only this offer uses."""
        for place in user.packed:
            self.packed.drop(place, user)
        user.packed.clear()


@attrs.define(eq=False)
class PackedOffer(RunOffer):
    """The products of one template.

    Attributes:
        written: places of the inputs that it writes, which may view the memory of a weight.
        seen: weights of earlier runs. packed: weights with a packed copy.
    """

    strategy: PackedProducts
    products: tuple[Product, ...]
    written: tuple[int, ...]
    seen: WeakKeyDictionary[torch.UntypedStorage, None] = attrs.field(factory=WeakKeyDictionary)
    packed: set[WeightPlace] = attrs.field(factory=set)
    concurrent = True

    def run(self, run: StrategyRun) -> Iterator[None]:
        """Run the template, and replace its products."""
        assert isinstance(run, ServedRun)
        values = [strided(run.run.env[place]) for place in self.written]
        written = {torch_private.storage_key(value) for value in values if value is not None}
        for product in self.products:
            yield from run.advance(product.step)
            given, _ = run.arguments(product.step)
            made = self._computed(product, given, written)
            if made is not None:
                yield from run.replace(product.step + 1, {product.place: made})

    def decided(self, ratio: float, *, used: bool, reason: str) -> None:  # noqa: ARG002 - the choice is enough
        """Free the copies if they are not used."""
        if not used:
            self.strategy.drop(self)

    def _computed(self, product: Product, given: tuple[Any, ...], written: Container[int]) -> torch.Tensor | None:
        rows_at, weight_at, _ = PRODUCTS[product.op]
        rows, weight = given[rows_at], given[weight_at]
        bias = next((one for at, one in enumerate(given) if at not in {rows_at, weight_at} and one is not None), None)
        fits = (
            weight.dim() == 2 and rows.dim() >= 2 and rows.dtype is weight.dtype and (bias is None or bias.dim() == 1)
        )
        if not fits or not rows.numel() or not is_plain(rows):
            return None
        packed = self.strategy.copy_of(weight, product, rows.numel() // rows.shape[-1], self, written)
        return None if packed is None else torch_private.packed_product(rows, packed, bias)


@hookimpl
def djinn_register_run_strategies() -> Iterable[RunStrategy]:
    """Return the strategy."""
    return [PackedProducts()]
