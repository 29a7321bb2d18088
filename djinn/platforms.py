"""For authors of commands and plugins: what the operating system offers, on each platform alike."""

from djinn_core.system.processes import ThreadTimes, lock_file
from djinn_server.system_limits import lower_priority, processors

__all__ = ["ThreadTimes", "lock_file", "lower_priority", "processors"]
