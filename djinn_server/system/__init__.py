"""Functions of the operating system for servers, in addition to `djinn_core.system`."""
