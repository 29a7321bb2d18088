"""Programs and tensors, on their way to an executor."""
