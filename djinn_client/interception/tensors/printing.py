"""Printing of remote tensors, with one fetch for all elements. Notebooks also show the executor and the memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.recording.recorder import current, recorders
from djinn_client.interception.runtime_interface import port
from djinn_client.interception.sync import fetch
from djinn_client.interception.tap import Cause, waiting_for
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote_tensor
from djinn_client.tracebacks import for_users
from djinn_core.system.front_end import preformatted, shell
from djinn_core.system.printable import size_text


def print_fetched() -> None:
    """Make PyTorch print the elements of a remote tensor after one fetch."""
    torch_dispatch.wrap_element_printing(_printing_fetched)


def _printing_fetched(plain: Callable[..., str]) -> Callable[..., str]:
    @for_users
    @functools.wraps(plain)
    def elements(tensor: torch.Tensor, indent: int) -> str:
        if not is_remote_tensor(tensor):
            return plain(tensor, indent)
        try:
            text = _elements(tensor, indent)
        except BaseException:
            torch_dispatch.end_printing()
            raise
        return f"{text}, size={tuple(tensor.shape)}" if text == "..." else text

    return elements


def _elements(tensor: Any, indent: int) -> str:
    """Return the elements as PyTorch prints them. Return "..." if a capture computed the tensor without data."""
    if tensor.is_meta or tensor.numel() == 0:
        return "[]"
    with port.lock:
        if recorders.meta_only.has(tensor.remote.handle, current().entries):
            return "..."
    with waiting_for(Cause.PRINT):
        return torch_dispatch.format_elements(fetch(tensor.detach()), indent)


def show_in_notebooks() -> None:
    """If the program runs in IPython, make IPython show remote tensors after one fetch, with a line about their memory."""
    formatter = getattr(shell(), "display_formatter", None)
    if formatter is not None:
        formatter.mimebundle_formatter.for_type(torch.Tensor, _mime_bundle)


def _mime_bundle(tensor: torch.Tensor, **_: Any) -> dict[str, str] | None:
    """Return the text and the HTML of a tensor after one fetch.

    Return None for other tensors and after an error, so that IPython uses its usual text.
    """
    if not isinstance(tensor, LazyTensor):
        return None
    try:
        text = repr(tensor)
        return {"text/plain": text, "text/html": preformatted(text, _residence(tensor))}
    except Exception:
        return None


def _residence(tensor: LazyTensor) -> str:
    """Return a line about a tensor's memory: its executor and its size."""
    storage, meta = tensor.remote.storage, tensor.remote.meta
    where = port.residence(storage.id, meta.device) if port.is_open() else "not sent yet"
    memory = size_text(storage.nbytes)
    usage = (
        f"{memory} of memory"
        if meta.nbytes >= storage.nbytes
        else f"views {size_text(meta.nbytes)} of {memory} of memory"
    )
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{tensor.device}: {where} · {kind}[{', '.join(map(str, tensor.shape))}] · {usage}"
