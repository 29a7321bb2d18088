"""`python -m djinn`: the command `djinn`, in a process that does not register the device. Servers need such a process."""

import os
import sys

_at = len(sys.orig_argv) - len(sys.argv)  # position of this module's name, after the interpreter's options
os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:_at], "djinn_core.cli", *sys.orig_argv[_at + 1 :]])
