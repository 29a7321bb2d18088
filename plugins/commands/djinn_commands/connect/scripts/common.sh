# Before every script. POSIX sh; `folder` and `environment` may be given; by default they lie in the
# user's data directory.
set -eu
umask 077
LC_ALL=C
export LC_ALL
at_home() { case $1 in '~'/*) printf %s "$HOME/${1#??}" ;; *) printf %s "$1" ;; esac; }
folder=$(at_home "${folder:-${XDG_DATA_HOME:-$HOME/.local/share}/djinn/connect}")
environment=$(at_home "${environment:-$folder/env}")

say() { printf '%s\n' "$*" >&2; }

# True if the process whose number is in the file $1 lives and has $2 in its command line: numbers are used again.
alive() {
    number=$(cat "$1" 2>/dev/null) || return 1
    [ -n "$number" ] && kill -0 "$number" 2>/dev/null || return 1
    [ ! -r "/proc/$number/cmdline" ] || tr '\0' ' ' <"/proc/$number/cmdline" | grep -q -F -e "$2"
}

# Ends the process of a file with a signal, and waits $3 seconds for it.
end() {
    alive "$1" "$2" || return 0
    kill -TERM "$number" 2>/dev/null || return 0
    waited=0
    while alive "$1" "$2" && [ "$waited" -lt "$3" ]; do
        sleep 1
        waited=$((waited + 1))
    done
    ! alive "$1" "$2"
}
