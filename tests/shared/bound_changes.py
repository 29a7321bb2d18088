"""How a client says that a template is bound to other values and scalars than the last time."""

import numpy as np

from djinn_client.runtime.sending.binding import Bindings
from djinn_core.ir.slot_arrays import slot_arrays


def changes(before, after):
    """Return the changes of inputs and slots between two runs. A run is a pair of inputs and slots."""
    first, second = (
        Bindings(*slot_arrays(slots), np.array(inputs, np.int64), np.empty(0, np.int64), ())
        for inputs, slots in (before, after)
    )
    return second.input_changes(first), second.slot_changes(first)
