"""What outlives a connection, and a process: leases, journals, snapshots."""
