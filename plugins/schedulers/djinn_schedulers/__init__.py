"""Schedulers: choose which ready step each device runs first."""
