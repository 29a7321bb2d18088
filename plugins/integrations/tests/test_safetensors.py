"""Files are read to the device and written from it, in either import order of safetensors and djinn."""

from __future__ import annotations

import pytest

IMPORTS = ("import safetensors.torch\nimport torch, djinn", "import torch, djinn\nimport safetensors.torch")
PROGRAM = """
import sys
{imports}
there = torch.arange(3.0, device="remote_accelerator:0"), torch.ones(2, device="remote_accelerator:0")
djinn.reset_stats()
safetensors.torch.save_file(dict(zip("ab", there)), sys.argv[1])
assert djinn.stats()["round_trips"] == 1, djinn.stats()
read = safetensors.torch.load_file(sys.argv[1], device="remote_accelerator:0")["a"]
assert str(read.device) == "remote_accelerator:0" and read.tolist() == [0, 1, 2]
"""


@pytest.mark.parametrize("imports", IMPORTS, ids=["before djinn", "after djinn"])
def test_either_import_order_works(python, served_environment, tmp_path, imports):
    code = PROGRAM.format(imports=imports)
    done = python.run("-c", code, tmp_path / "a.safetensors", env=served_environment)
    assert done.returncode == 0, done.stderr[-2000:]
