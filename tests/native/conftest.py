from __future__ import annotations

import sys
from pathlib import Path

# `random_programs.py` is a script, too.
sys.path.insert(0, str(Path(__file__).parent))
