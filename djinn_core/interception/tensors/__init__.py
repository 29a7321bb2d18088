"""Remote tensors and the storages that they look into."""
