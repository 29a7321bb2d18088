"""Schedulers: what each device does first of what is ready for it."""
