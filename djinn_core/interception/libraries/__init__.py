"""Adapters that make third-party libraries know the device, applied when the user's program imports them, never before."""
