# A line for each job: name, state, exit status, begin, end, now, command; with tabs between them. `job`: only of that one, or one that it begins.
cd "$folder/jobs" 2>/dev/null || exit 0
now=$(date +%s)
for place in "$job"*/; do
    name=${place%/}
    [ -s "$name/begun" ] || continue # it is just being begun, or the disk was full
    code=''
    end=''
    if [ -s "$name/ended" ]; then
        read -r end code <"$name/ended"
        state=failed
        [ "$code" != 0 ] || state='done'
        [ ! -e "$name/stop" ] || state=stopped
    elif alive "$name/pid" "$folder/jobs/$name/"; then
        state=$(cat "$name/state")
        [ -n "$state" ] || state=preparing
    else
        state=lost
    fi
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$name" "$state" "$code" "$(cat "$name/begun")" "$end" "$now" "$(cat "$name/shown" 2>/dev/null || :)"
done
