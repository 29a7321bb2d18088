"""What placement policies and schedulers are written with: what has to be in one place, sizes, and predicted times."""

from __future__ import annotations

from djinn_core.ir.together import Together, homes_of_values, resident_blocks, storage_sizes, together

__all__ = ["Together", "homes_of_values", "resident_blocks", "storage_sizes", "together"]
