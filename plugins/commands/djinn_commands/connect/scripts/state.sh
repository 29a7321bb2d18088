# Says what runs, a fact a line.
if [ -x "$environment/bin/python" ]; then
    [ ! -r "$folder/env/installed" ] || echo "installed $(cat "$folder/env/installed")"
fi
if runs && [ -s "$connection" ]; then
    echo "server $number"
    echo "options $(cat "$folder/server/options" 2>/dev/null || :)"
fi
