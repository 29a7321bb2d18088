# The log of a job from its byte `from` on, the first is 1; with `follow` until the job has ended.
cd "$folder/jobs/$job"
while :; do
    # Looked at before the log is read: what it says last is in it then.
    over=yes
    [ -s ended ] || ! alive pid "$folder/jobs/$job/" || over=no
    size=$(wc -c <log)
    if [ "$size" -ge "$from" ]; then
        tail -c "+$from" log | head -c "$((size - from + 1))"
        from=$((size + 1))
    fi
    [ "$follow" = yes ] && [ "$over" = no ] || break
    # The client is gone if the process that runs this is.
    kill -0 "$PPID" 2>/dev/null || break
    sleep 0.3 2>/dev/null || sleep 1
done
