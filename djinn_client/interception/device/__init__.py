"""The device that PyTorch sees: device module, memory, streams and random state."""
