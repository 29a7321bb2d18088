# Starts the server unless it runs, waits until it listens, and prints its connection file. `options`: what `djinn serve` is given, as words
# of sh, if they are `given`, and otherwise those of the last start; `restart`: yes ends one that runs; `seconds`: how long it may take.
mkdir -p "$folder/server"
cd "$folder/server"
before=$(cat options 2>/dev/null || :)
[ "$given" = yes ] || options=$before
if [ "$restart" != yes ] && [ "$options" != "$before" ] && runs; then
    say "the server runs with other options ($before): end it with djinn disconnect --stop first"
    exit 12
fi
[ "$restart" != yes ] || stop_server
if ! { runs && [ -s "$connection" ]; }; then
    stop_server
    python=$environment/bin/python
    [ -s token ] || { "$python" -I -c 'import secrets; print(secrets.token_urlsafe(32))' >token.new && mv token.new token; }
    [ -s port ] || "$python" -I -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])' >port
    printf '%s\n' "$options" >options
    # An own file: systemd runs it, too, and its process becomes the server's.
    cat >start.sh <<END
#!/bin/sh
umask 077
cd "\$HOME"
echo \$\$ >'$folder/server/pid'
PATH='$environment/bin':\$PATH
export PATH
exec '$python' -P -m djinn serve --connection-file '$connection' --token-file '$folder/server/token' --port \$(cat '$folder/server/port') \\
    --without-transport http --lease-seconds 300 $options
END
    chmod 700 start.sh
    : >log
    if [ "$background" != yes ] && with_systemd; then
        echo systemd >how
        units=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user
        mkdir -p "$units"
        cat >"$units/$unit.service" <<END
[Unit]
Description=Djinn server of djinn connect
[Service]
ExecStart="$folder/server/start.sh"
StandardOutput=append:$folder/server/log
StandardError=append:$folder/server/log
Restart=on-failure
RestartSec=5
[Install]
WantedBy=default.target
END
        systemctl --user daemon-reload
        systemctl --user enable --now "$unit" >/dev/null 2>&1 || { say "systemd did not start the server:"; tail -n 12 log >&2; exit 7; }
    else
        echo background >how
        nohup "$python" -I -c 'import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])' "$folder/server/start.sh" \
            </dev/null >>log 2>&1 &
        first=$!
    fi
    waited=0
    while [ ! -s "$connection" ]; do
        sleep 0.2 2>/dev/null || sleep 1
        waited=$((waited + 1))
        if [ -n "${first:-}" ] && ! kill -0 "$first" 2>/dev/null || [ "$waited" -gt "$((seconds * 5))" ]; then
            [ -s "$connection" ] && break
            say "the server did not start. The end of $folder/server/log:"
            tail -n 12 log >&2
            rm -f port
            stop_server
            exit 7
        fi
    done
fi
echo "how $(cat how)"
echo "connection"
cat "$connection"
