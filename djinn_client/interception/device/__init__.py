"""The device that PyTorch sees: its module, its memory, its streams, its random state."""
