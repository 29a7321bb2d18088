"""For authors of commands and plugins: what the operating system offers, on each platform alike."""

from djinn_core.system.limits import lower_priority, processors
from djinn_core.system.processes import ThreadTimes, lock_file

__all__ = ["ThreadTimes", "lock_file", "lower_priority", "processors"]
