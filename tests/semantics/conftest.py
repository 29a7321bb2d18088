from __future__ import annotations

import sys
from pathlib import Path

# The labelled zoo is shared by its tests and by `benchmarks/semantics.py`; it is built from the models in `tests/zoo`.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "zoo")]
