# Ends the server.
stop_server
