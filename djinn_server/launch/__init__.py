"""Start executor processes, and exchange messages with them over pipes.

A client starts the executors of its own program. A gateway starts one executor for each device.
"""
