"""Random state lives on the executor; seeding it is an instruction like any other, so program order holds."""

from __future__ import annotations

from djinn_core.interception.dispatch import append
from djinn_core.ir.form import Form, SlotArg
from djinn_core.ir.operators import MANUAL_SEED
from djinn_core.ir.program import Call, Signature

_FORM = Form(op=MANUAL_SEED, args=(SlotArg(),), kwargs=(), results=("none",), sequence=False)
_SEED = Call(
    signature=Signature(_FORM, ()),
    operands=(),
    results=(None,),
    aliases=(-1,),
    inplace=(-1,),
    writes=(),
    random=True,
    operand_count=0,
    slot_count=1,
    new_count=0,
    nbytes=(0,),
)


def seed_everything(seed: int) -> None:
    """Record that the remote random state restarts from `seed`, as `torch.manual_seed` does for every device."""
    append(_SEED, [], [int(seed) & 0xFFFF_FFFF_FFFF_FFFF])
