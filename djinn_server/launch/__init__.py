"""Executor processes: starting them, and the pipe protocol between an executor and its parent.

The client starts one for the embedded default, the gateway one for each device.
"""
