"""Return the network round trip to the executor in seconds, without the executor's own time; None if unknown."""
