"""Remote tensors and their storages."""
