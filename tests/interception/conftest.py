from __future__ import annotations

import sys
from pathlib import Path

# `sameness`, which several files of this folder use.
sys.path.insert(0, str(Path(__file__).parent))
