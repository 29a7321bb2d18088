# Ends the server. The next one begins with its own options.
stop_server
rm -f "$folder/server/options"
