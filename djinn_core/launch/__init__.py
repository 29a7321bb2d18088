"""Starting executor processes, and what their parent and they say to each other.

The client starts one for the embedded default, the gateway one for each device.
"""
