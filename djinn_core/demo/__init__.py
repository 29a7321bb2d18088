"""The demo: three real programs, each run here and on a server of its own, side by side.

It is written as a user would write it: it imports `djinn` and PyTorch, and reaches into nothing.

- `task`: what a demonstration is. `embeddings`, `generation`, `training`: the three.
- `server`: a `djinn serve` process that lives as long as the demo.
- `measure`: runs a task locally and remotely and keeps what was seen. `table`: shows it. `show`: the whole of it.
"""
