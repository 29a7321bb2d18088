"""A token of the toy GPT by other libraries, each in a separate process: `python -m evaluation.benchmarks.peers rpc`.

    local       eager PyTorch, for comparison
    rpc         every op as a synchronous call with remote handles, in a minimal implementation
    torch_rpc   a torch.distributed.rpc process that holds the model
    ray         a Ray actor that holds the model and is called per token
    mycelya     mycelya-torch, its executor in this process
    monarch     a Monarch actor that holds the model

Prints JSON, or what is not installed. All run the same loop over a growing cache; torch.distributed.rpc, Ray and
Monarch run it next to the model.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, ClassVar

import torch

from djinn_client import torch_dispatch

TOY = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 1}
TOKENS = 48
KEY = b"benchmark"


class NotInstalled(Exception):
    """A missing requirement, named by the text."""


def toy() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**TOY)).eval()


@torch.no_grad()
def decoding(model: torch.nn.Module, given: torch.Tensor) -> Iterator[int]:
    """Yield greedy tokens forever. A long cache starts anew."""
    while True:
        out = model(given, use_cache=True)
        for _ in range(TOKENS):
            token = out.logits[:, -1:].argmax(-1)
            yield int(token.item())
            out = model(token, past_key_values=out.past_key_values, use_cache=True)


# --- one call per op -------------------------------------------------------------------------------------------------


class Remote(torch.Tensor):
    """A tensor of the other process: its metadata and a handle."""

    connection: Connection

    @staticmethod
    def of(handle: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Remote:
        made = torch_dispatch.make_wrapper(Remote, shape, stride, 0, dtype, torch.device("cpu"))
        made.handle = handle
        return made

    @staticmethod
    def ask(*question: Any) -> Any:
        Remote.connection.send(question)
        return Remote.connection.recv()

    def __del__(self) -> None:
        Remote.freed.append(self.handle)

    freed: ClassVar[list[int]] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        dead, Remote.freed = Remote.freed, []
        packed = pack((args, kwargs or {}))
        return unpack(Remote.ask("run", func.name(), packed, dead))

    __torch_function__ = torch_dispatch.disabled_torch_function


class Handle(tuple):  # noqa: SLOT001 - small is what it is to be
    """The message form `(handle, shape, stride, dtype)`."""


def pack(value: Any) -> Any:
    if isinstance(value, Remote):
        return Handle((value.handle,))
    if isinstance(value, dict):
        return {name: pack(each) for name, each in value.items()}
    return type(value)(map(pack, value)) if type(value) in {tuple, list} else value


def unpack(value: Any) -> Any:
    if isinstance(value, Handle):
        return Remote.of(*value)
    return type(value)(map(unpack, value)) if type(value) in {tuple, list} else value


def rpc_server(listener: Listener) -> None:
    """Run ops one after the other."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    values: dict[int, torch.Tensor] = {}
    number = itertools.count()

    def kept(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            handle = next(number)
            values[handle] = value
            return Handle((handle, tuple(value.shape), value.stride(), value.dtype))
        return type(value)(map(kept, value)) if type(value) in {tuple, list} else value

    def found(value: Any) -> Any:
        if isinstance(value, Handle):
            return values[value[0]]
        if isinstance(value, dict):
            return {name: found(each) for name, each in value.items()}
        return type(value)(map(found, value)) if type(value) in {tuple, list} else value

    with listener.accept() as connection, torch.no_grad(), contextlib.suppress(EOFError):
        while True:
            question = connection.recv()
            if question[0] == "put":
                connection.send(kept(torch.from_numpy(question[1])))
                continue
            _, name, (args, kwargs), dead = question
            operator, _, overload = name.removeprefix("aten::").partition(".")
            result = getattr(getattr(torch.ops.aten, operator), overload or "default")(*found(args), **found(kwargs))
            connection.send(kept(result))
            for handle in dead:
                del values[handle]


def rpc(beside: Callable[..., Any] | None = None) -> Callable[[], object]:
    """Return the decoder. `beside` starts the server; by default in a process."""
    listener = Listener(("127.0.0.1", 0), authkey=KEY)
    beside = beside or multiprocessing.get_context("fork").Process
    beside(target=rpc_server, args=(listener,), daemon=True).start()
    Remote.connection = Client(listener.address, authkey=KEY)
    model = toy()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return unpack(Remote.ask("put", tensor.detach().numpy()))

    ties: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in ties:
                ties[id(parameter)] = torch.nn.Parameter(moved(parameter), requires_grad=False)
            setattr(module, name, ties[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, moved(buffer))
    steps = decoding(model, moved(torch.arange(1, 17)[None]))
    return lambda: next(steps)


# --- other libraries ----------------------------------------------------------------------------------------------


def local() -> Callable[[], object]:
    steps = decoding(toy(), torch.arange(1, 17)[None])
    return lambda: next(steps)


class HeldModel:
    """The model in the process of another worker."""

    def __init__(self) -> None:
        self.step = local()

    def token(self) -> int:
        """Return the next token."""
        return self.step()


def _serve_torch_rpc(port: str) -> None:
    from torch.distributed import rpc as library

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _join_torch_rpc(port, 1)
    library.shutdown()


def _join_torch_rpc(port: str, rank: int) -> None:
    from torch.distributed import rpc as library

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    library.init_rpc(f"worker{rank}", rank=rank, world_size=2)


def torch_rpc() -> Callable[[], object]:
    from torch.distributed import rpc as library

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    multiprocessing.get_context("spawn").Process(target=_serve_torch_rpc, args=(port,), daemon=True).start()
    _join_torch_rpc(port, 0)
    holder = library.remote("worker1", HeldModel)
    return lambda: holder.rpc_sync().token()


def ray() -> Callable[[], object]:
    try:
        import ray as library
    except ImportError:
        raise NotInstalled("pip install ray") from None
    threads = torch.get_num_threads()
    library.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")

    class Holder:
        def __init__(self) -> None:
            torch.set_num_threads(threads)
            self.step = local()

        def token(self) -> int:
            return self.step()

    holder = library.remote(Holder).remote()
    return lambda: library.get(holder.token.remote())


def mycelya() -> Callable[[], object]:
    try:
        import mycelya_torch
    except ImportError as error:
        raise NotInstalled(f"mycelya-torch, its requirements, and a C++ compiler: {error}") from None
    machine = mycelya_torch.RemoteMachine("mock")
    device = machine.device("cpu")
    steps = decoding(toy().to(device), torch.arange(1, 17)[None].to(device))
    return lambda: next(steps)


def monarch() -> Callable[[], object]:
    try:
        from monarch.actor import Actor, endpoint, this_host
    except ImportError as error:
        raise NotInstalled(f"torchmonarch and its requirements: {error}") from None
    threads = torch.get_num_threads()

    class Holder(Actor):
        def __init__(self) -> None:
            torch.set_num_threads(threads)
            self.step = local()

        @endpoint
        def token(self) -> int:
            return self.step()

    holder = this_host().spawn_procs(per_host={"gpus": 1}).spawn("holder", Holder)
    return lambda: holder.token.call_one().get()


PEERS = {"local": local, "rpc": rpc, "torch_rpc": torch_rpc, "ray": ray, "mycelya": mycelya, "monarch": monarch}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--times", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        here, there = local(), PEERS[options.peer]()
    except NotInstalled as reason:
        print(json.dumps({"not installed": str(reason)}))
        sys.stdout.flush()
        os._exit(0)
    for run in (here, there):
        for _ in range(options.times):
            run()
    seconds: dict[str, list[float]] = {"local": [], "peer": []}
    for turn in range(options.rounds):
        order = [("local", here), ("peer", there)]
        for name, run in order if turn % 2 else reversed(order):
            found = []
            for _ in range(options.times):
                start = time.perf_counter()
                run()
                found.append(time.perf_counter() - start)
            seconds[name].append(sorted(found)[len(found) // 2])
    print(json.dumps(seconds))
    sys.stdout.flush()
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)  # skips the exit messages of libraries


if __name__ == "__main__":
    main()
