"""Entry point of an executor process. It imports the executor without garbage collection.

A collection during the imports frees nothing and visits all objects of PyTorch, which takes up to 0.15 s.
"""

from __future__ import annotations

if __name__ == "__main__":
    import gc

    gc.disable()  # until `freeze_startup_objects`

    from djinn_server.executor import main

    main()
