"""Built-in planning plugins: cost model, placement policies and scheduler, with their helpers."""
