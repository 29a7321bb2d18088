"""Calibration of cost models by measuring devices, and validation of predictions."""
