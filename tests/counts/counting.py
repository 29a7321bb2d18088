"""Run a program and print its `djinn.stats()` as JSON in the last line.

python counting.py PROGRAM [ARGUMENT...]

Counting begins once the session is open, because the size of opening messages depends on the machine. `djinn.reset_stats` does nothing.
"""

from __future__ import annotations

import json
import runpy
import sys

import djinn

djinn.init()
djinn.reset_stats()
djinn.reset_stats = lambda: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps(dict(djinn.stats())))
