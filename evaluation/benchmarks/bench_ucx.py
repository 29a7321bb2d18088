"""Large buffers over UCX against TCP, both ways, on one machine.

    python -m evaluation bench-ucx [--json] [--quick] [--case ucx_64_mib]

`UCX_TLS` selects UCX's transports; `UCX_TLS=shm,self UCX_MM_ERROR_HANDLING=y` is shared memory. The reference is
`tcp://` in the same run, in both orders.
"""

from __future__ import annotations

from functools import partial

from djinn_ucx import UcxTransport
from evaluation.benchmarks.bench_transports import LARGE_BYTES, OverTransport, against, tcp
from evaluation.benchmarks.measuring import Case, main


def ucx() -> OverTransport:
    return OverTransport(UcxTransport(), "ucx://127.0.0.1:0")


CASES = (
    Case("ucx_64_mib", None, partial(against, tcp, ucx, LARGE_BYTES, 8)),
    Case("ucx_4_mib", None, partial(against, tcp, ucx, 4 << 20, 50)),
    Case("ucx_64_kib", None, partial(against, tcp, ucx, 64 << 10, 500)),  # small buffers use the socket in both
)

if __name__ == "__main__":
    main("UCX beside a socket", CASES)
