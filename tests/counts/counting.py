"""Run a program and print what it sent, received and waited for, as JSON in the last line.

python counting.py PROGRAM [ARGUMENT...]

Counting begins once the session is open: the messages that open it name the machine. The program's own resets do not count.
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
