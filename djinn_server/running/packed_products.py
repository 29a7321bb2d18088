"""A run strategy of CPUs: products with weights that nothing writes, from copies in oneDNN's layout. They round in another way than the ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch

from djinn_core import torch_private
from djinn_server.batching.joined_runs import is_plain
from djinn_server.batching.products import PRODUCTS, Product, find_products
from djinn_server.batching.weights import PackedWeights, WeightPlace, place_of
from djinn_server.hookspecs.devices import DeviceRuntime
from djinn_server.hookspecs.run_strategies import RunOffer, RunStrategy, StrategyRun, TemplateFacts
from djinn_server.running.arbiter import ServedFacts
from djinn_server.running.input_aliases import aliases_of
from djinn_server.running.own_operators import OwnOperators


class PackedProducts(RunStrategy):
    """Compute products from packed copies of their weights. The arbiter measures whether that is faster.

    Attributes:
        packed: the copies. Sessions tell it before they write into a value.
    """

    name = "packed_products"
    exact = False

    def __init__(self, runtime: DeviceRuntime, own: OwnOperators) -> None:
        self._own = own
        self.packed = PackedWeights(runtime)

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return an offer for a template with products of inputs that it does not write."""
        assert isinstance(template, ServedFacts)
        products = find_products(template.template, aliases_of(template.template, self._own))
        return PackedOffer(self, products) if products else None

    def copy_of(self, weight: torch.Tensor, product: Product, rows: int, user: PackedOffer) -> torch.Tensor | None:
        """Return the packed copy of a weight; None at the first sight of it, or if it cannot be packed."""
        storage, packed = weight.untyped_storage(), self.packed.get(weight)
        if packed is None and storage in user.seen:
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
    """The products of one template. `seen`: weights that runs have had. `packed`: those of them with a copy."""

    strategy: PackedProducts
    products: tuple[Product, ...]
    seen: WeakKeyDictionary[torch.UntypedStorage, None] = attrs.field(factory=WeakKeyDictionary)
    packed: set[WeightPlace] = attrs.field(factory=set)
    concurrent = True

    def run(self, run: StrategyRun) -> Iterator[None]:
        """Run the template, and replace its products."""
        for product in self.products:
            yield from run.advance(product.step)
            given, _ = run.arguments(product.step)
            made = self._computed(product, given)
            if made is not None:
                yield from run.replace(product.step + 1, {product.place: made})

    def decided(self, ratio: float, *, used: bool, reason: str) -> None:  # noqa: ARG002 - the choice is enough
        """Free the copies if they are not used."""
        if not used:
            self.strategy.drop(self)

    def _computed(self, product: Product, given: tuple[Any, ...]) -> torch.Tensor | None:
        rows_at, weight_at, _ = PRODUCTS[product.op]
        rows, weight = given[rows_at], given[weight_at]
        bias = next((one for at, one in enumerate(given) if at not in {rows_at, weight_at} and one is not None), None)
        fits = (
            weight.dim() == 2 and rows.dim() >= 2 and rows.dtype is weight.dtype and (bias is None or bias.dim() == 1)
        )
        if not fits or not rows.numel() or not is_plain(rows):
            return None
        packed = self.strategy.copy_of(weight, product, rows.numel() // rows.shape[-1], self)
        return None if packed is None else torch_private.packed_product(rows, packed, bias)
