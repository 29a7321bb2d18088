# Removes a job that has ended, with its files.
cd "$folder/jobs"
if alive "$job/pid" "$folder/jobs/$job/"; then
    say "the job is running: end it with djinn stop first"
    exit 11
fi
rm -rf "$job"
