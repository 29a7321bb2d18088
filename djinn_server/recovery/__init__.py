"""Recovery of sessions after a lost connection or a dead process: leases, journals, snapshots."""
