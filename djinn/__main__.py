"""`python -m djinn`: the command, in a process in which importing `djinn` has not registered the device, as servers need it."""

import os
import sys

_at = len(sys.orig_argv) - len(sys.argv)  # where the name of this module stands, behind the options of the interpreter
os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:_at], "djinn_core.cli", *sys.orig_argv[_at + 1 :]])
