"""Functions of the operating system for servers: memory, mapped files, confinement. `djinn_core.system` has further functions."""
