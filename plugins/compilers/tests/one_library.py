"""The work of the compiler's process, for one library on a machine that has compiled none: without what pays off later.

Precompiled headers do from the third library on, and are half of the time of the first. Headers for vectors and optimizing
take a second or two.
"""

from __future__ import annotations

from torch._inductor import config

from djinn_compilers.inductor import compiler

QUICK = {
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "cpp.simdlen": 0,
}


def package(packed: bytes) -> bytes:
    """Return the library as `compiler.package` does, with the options in `QUICK`."""
    with config.patch(QUICK):
        return compiler.package(packed)
