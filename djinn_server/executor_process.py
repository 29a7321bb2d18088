"""Entry of an executor process: imports the executor without garbage collection.

A collection finds nothing to free while modules are imported, and looks at all that PyTorch has made: up to 0.15 s each time.
"""

from __future__ import annotations

if __name__ == "__main__":
    import gc

    gc.disable()  # until `set_start_aside`

    from djinn_server.executor import main

    main()
