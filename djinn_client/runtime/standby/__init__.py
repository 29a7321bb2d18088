"""A session that another server goes on with: what was sent is kept here, and sent to that one."""
