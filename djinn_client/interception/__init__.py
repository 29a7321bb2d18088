"""Stage 1: the device that PyTorch sees, and the recording of its ops."""
