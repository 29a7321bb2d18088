# Takes wheels, as a tar archive on standard input. Those that came whole count; the others are sent again.
mkdir -p "$folder/wheels" "$folder/incoming"
rm -f "$folder"/incoming/*
cd "$folder/incoming"
tar -xf - && [ -e whole ] || { say "the archive did not arrive whole, or the disk is full"; df -Pk . >&2; exit 3; }
for file in *.whl; do
    [ ! -f "$file" ] || mv -f "$file" ../wheels/
done
