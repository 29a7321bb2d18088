"""The work of the compiler's process, for one library on a machine that has compiled none: without precompiled headers.

They pay off from the third library on; for the first they are half of the time.
"""

from __future__ import annotations

from torch._inductor import config

from djinn_inductor import compiler


def package(packed: bytes) -> bytes:
    """The same as the compiler's `package`."""
    with config.patch({"aot_inductor.precompile_headers": False, "cpp_cache_precompile_headers": False}):
        return compiler.package(packed)
