"""Sparse, compressed, quantized and nested tensors on the remote device."""
