# Which wheels of an earlier call are there, with their digests.
if cd "$folder/wheels" 2>/dev/null; then
    for file in *.whl; do
        [ ! -f "$file" ] || sha256sum "$file"
    done
fi
