"""Memory that sessions share: what is left of it where a value is poisoned, moved or consumed."""

from __future__ import annotations

import torch

from djinn_core.wire.message_base import Failure
from djinn_server.running.input_aliases import InputAliases
from djinn_server.running.values import Poison, ValueTable
from djinn_server.weights.shared_weights import Origin, SessionShares, WeightKey

HANDLE = 5 << 32
ORIGIN = Origin("file:x", WeightKey(bytes(32), "x", 0, 16))


def test_overwritten_poison_has_own_memory():
    """A refused program poisons its outputs without a copy. A complete overwrite makes an output a tensor again."""
    memory = torch.ones(4)
    values = ValueTable()
    with torch.inference_mode():
        values[HANDLE] = torch.empty(0).set_(memory.untyped_storage(), 0, (4,), (1,))
    shares = SessionShares(values)
    shares.add(HANDLE, ORIGIN)
    values.poison_storage(HANDLE, 0, Failure(1, 0, "aten::add_", "RuntimeError", "refused"))
    poison = values[HANDLE]
    assert isinstance(poison, Poison)
    shares.before_run(InputAliases((0,), (), 0), [HANDLE], ())
    assert poison.memory is not None
    with torch.inference_mode():
        poison.memory.zero_()
    assert memory.tolist() == [1.0] * 4
    assert not shares.storages


def test_relaid_view_is_not_named_by_address():
    """A snapshot would name the view with an address of other bytes."""
    values = ValueTable()
    values[HANDLE] = torch.ones(2, 2)
    values[HANDLE + 1] = values[HANDLE].t()
    values[HANDLE + 2] = values[HANDLE].t().contiguous()
    shares = SessionShares(values)
    shares.add(HANDLE, ORIGIN)
    assert sorted(handle for handle, _, _ in shares.unmodified()) == [HANDLE, HANDLE + 1]
