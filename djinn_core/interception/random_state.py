"""Random state lives on the executor; seeding it is an instruction like any other, so program order holds."""

from __future__ import annotations

import torch

from djinn_core.interception.dispatch import append
from djinn_core.interception.sync import fetch
from djinn_core.interception.upload import upload_copy
from djinn_core.ir.form import Form, Operand, SlotArg
from djinn_core.ir.operators import GET_RANDOM_STATE, MANUAL_SEED, SET_RANDOM_STATE
from djinn_core.ir.program import Call, Signature
from djinn_core.ir.values import TensorMeta, tensor_meta


def _call(form: Form, operands: tuple[TensorMeta, ...]) -> Call:
    made = form.results == ("new",)
    return Call(
        signature=Signature(form, operands, layout_trusted=True),
        operands=operands,
        results=(_STATE if made else None,),
        aliases=(-1,),
        inplace=(-1,),
        writes=(),
        random=True,
        operand_count=form.operand_count,
        slot_count=form.slot_count,
        new_count=form.new_count,
        nbytes=(0,),
    )


_STATE = tensor_meta((0,), (1,), 0, torch.uint8)
_SEED = _call(Form(MANUAL_SEED, (SlotArg(),), (), ("none",), False), ())
_GET = _call(Form(GET_RANDOM_STATE, (), (), ("new",), False), ())
_SET = Form(SET_RANDOM_STATE, (Operand(),), (), ("none",), False)


def manual_seed(seed: int) -> None:
    """Record that the remote random state restarts from `seed`, as `torch.manual_seed` does for every device."""
    append(_SEED, [], [int(seed) & 0xFFFF_FFFF_FFFF_FFFF])


def get_state() -> torch.Tensor:
    """The remote random state, as a CPU tensor of bytes; one round trip."""
    return fetch(append(_GET, [], []))


def set_state(state: torch.Tensor) -> None:
    """Record that the remote random state goes on from `state`."""
    remote = upload_copy(state)
    append(_call(_SET, (remote.remote.meta,)), [remote], [])
