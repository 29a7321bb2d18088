"""Templates that run often, compiled in the background and used where that is faster."""
