from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# `op_database` is a script, too (`make conformance`), so it lies beside its test instead of in a package.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def embedded_for_all():
    """`remote_accelerator` is the embedded default: an executor process of its own."""
    import torch

    import djinn

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("DJINN_")]:
            patch.delenv(name)
        patch.setenv("DJINN_CONFIG", os.devnull)
        djinn.configure(threads=1)
        yield
        djinn.configure()
    torch.set_num_threads(threads)
