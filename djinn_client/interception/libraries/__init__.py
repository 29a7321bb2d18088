"""Changes to modules that a program may import later than `djinn`: PyTorch's own here, those of libraries by plugins."""
