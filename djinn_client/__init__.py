"""The client: the device that PyTorch sees, and the session that runs what it records."""
