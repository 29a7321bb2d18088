"""An executor for tests: some of its kernels are slightly wrong, some are missing. Run as a server, it offers that executor."""

from __future__ import annotations

import sys
from pathlib import Path

WRONG = "aten::tanh"  # of what it returns, one element in a hundred is off by a thousandth
WRONG_IN_PLACE = "aten::mul_.Tensor"  # does not write the last element
WRONG_IN_LIST = "aten::_foreach_mul_.Scalar"  # which returns nothing: does not write the last tensor
MISSING = frozenset({"aten::erfinv", "aten::erfinv_", "aten::lgamma"})  # says that it has no kernel for these


def _wrong(kernel):
    def slightly_off(given):
        out = kernel(given).clone()
        out.view(-1)[::100] *= 1.001
        return out

    return slightly_off


def _forgetful(kernel):
    def drop_last_element(target, factor):
        last = target[..., -1:].clone()
        kernel(target, factor)
        target[..., -1:].copy_(last)
        return target

    return drop_last_element


def _forgets_the_last_tensor(kernel):
    return lambda targets, factor: kernel(targets[:-1], factor)


def _missing(func):
    def raise_missing(*_, **__):
        raise NotImplementedError(f"Could not run '{func.name()}' with arguments from the 'Test' backend.")

    return raise_missing


def execute():
    """Run as an executor."""
    from djinn_core import torch_private
    from djinn_server import executor

    right = torch_private.kernel_of
    made_wrong = {WRONG: _wrong, WRONG_IN_PLACE: _forgetful, WRONG_IN_LIST: _forgets_the_last_tensor}

    def kernel_of(func):
        if func.name() in MISSING:
            return _missing(func)
        return made_wrong.get(func.name(), lambda kernel: kernel)(right(func))

    torch_private.kernel_of = kernel_of
    executor.main()


def serve(file):
    """Run as a server."""
    from djinn_server.gateway.gateway import serve as serve_gateway
    from djinn_server.gateway.gateway_config import GatewayConfig
    from djinn_server.launch.executor_config import ExecutorConfig

    config = GatewayConfig(
        devices=("cpu",),
        executor=ExecutorConfig(threads=1, module=Path(__file__).stem),
        connection_file=Path(file),
        drain_seconds=0.5,
    )
    serve_gateway(config, lambda _: print("Clients on this machine: by the connection file", flush=True))


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["serve"] else execute()
