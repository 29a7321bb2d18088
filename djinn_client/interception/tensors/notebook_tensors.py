"""Remote tensors in notebooks: their text, and above it their executor and their memory."""

from __future__ import annotations

from typing import Any

import torch

from djinn_client.interception.runtime_interface import port
from djinn_client.interception.tensors.lazy_tensor import LazyTensor
from djinn_core.system.front_end import preformatted, shell
from djinn_core.system.printable import size_text


def show_in_notebooks() -> None:
    """Have the IPython that the program runs in, if it does, show remote tensors in this way."""
    formatter = getattr(shell(), "display_formatter", None)
    if formatter is not None:
        formatter.mimebundle_formatter.for_type(torch.Tensor, _mime_bundle)


def _mime_bundle(tensor: torch.Tensor, **_: Any) -> dict[str, str] | None:
    """Both texts, fetched once; None where IPython is to show the tensor as it is used to, also if it raises an error."""
    if not isinstance(tensor, LazyTensor):
        return None
    try:
        text = repr(tensor)
        return {"text/plain": text, "text/html": preformatted(text, _residence(tensor))}
    except Exception:
        return None


def _residence(tensor: LazyTensor) -> str:
    """One line about a tensor's memory: its executor, and its bytes."""
    storage, meta = tensor.remote.storage, tensor.remote.meta
    where = port.residence(storage.id, meta.device) if port.is_open() else "not sent yet"
    memory = size_text(storage.nbytes)
    held = (
        f"{memory} of memory"
        if meta.nbytes >= storage.nbytes
        else f"views {size_text(meta.nbytes)} of {memory} of memory"
    )
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{tensor.device}: {where} · {kind}[{', '.join(map(str, tensor.shape))}] · {held}"
