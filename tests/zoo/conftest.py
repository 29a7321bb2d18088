from __future__ import annotations

import sys
from pathlib import Path

# The modules of the zoo are shared by its tests and by `make zoo`, which runs them as scripts.
sys.path.insert(0, str(Path(__file__).parent))
