"""Calibrate cost models by measuring devices, and validate their predictions."""
