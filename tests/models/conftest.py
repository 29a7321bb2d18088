from __future__ import annotations

import sys
from pathlib import Path

# `architectures` is shared by tests of this folder.
sys.path.insert(0, str(Path(__file__).parent))
