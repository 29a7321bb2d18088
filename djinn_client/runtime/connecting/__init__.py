"""From settings to a session, and back to it when its connection, its executor or its server is lost."""
