"""`python -m djinn`: the command, in a process where importing `djinn` has not registered the device. Servers need that."""

import os
import sys

_at = len(sys.orig_argv) - len(sys.argv)  # position of this module's name, after the interpreter's options
os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:_at], "djinn_core.cli", *sys.orig_argv[_at + 1 :]])
