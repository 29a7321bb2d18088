from __future__ import annotations

import sys
from pathlib import Path

# `run_differential.py` is a script, too, so its modules lie beside it instead of in a package.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "conformance")]
