"""Entry of an executor process: imports the executor without garbage collection.

A collection during imports frees nothing and visits all objects of PyTorch: up to 0.15 s each time.
"""

from __future__ import annotations

if __name__ == "__main__":
    import gc

    gc.disable()  # until `set_start_aside`

    from djinn_server.executor import main

    main()
