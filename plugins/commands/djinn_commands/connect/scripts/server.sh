# Before scripts about the server.
connection=$folder/server/connection.json
unit=djinn-connect
runs() { alive "$folder/server/pid" "$connection"; }

with_systemd() {
    systemctl --user show -p Version >/dev/null 2>&1 || return 1
    user=$(id -un)
    [ "$(loginctl show-user "$user" -p Linger --value 2>/dev/null)" = yes ] && return 0
    loginctl --no-ask-password enable-linger >/dev/null 2>&1 || return 1
    [ "$(loginctl show-user "$user" -p Linger --value 2>/dev/null)" = yes ]
}

stop_server() {
    if [ "$(cat "$folder/server/how" 2>/dev/null)" = systemd ]; then
        systemctl --user disable --now "$unit" >/dev/null 2>&1 || :
    fi
    # The first signal lets sessions end, the second one ends them.
    end "$folder/server/pid" "$connection" 8 || end "$folder/server/pid" "$connection" 20 || kill -KILL "$number" 2>/dev/null || :
    rm -f "$folder/server/pid" "$connection"
}
