"""Programs that measure Djinn: `python -m evaluation NAME [ARGS]`, in the root of a checkout. Tests are in `tests`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "tests" / "shared"))  # modules that tests and evaluations share
