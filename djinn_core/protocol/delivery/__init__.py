"""Delivery: frames that arrive exactly once, although connections break."""
