# Files of a job, as a tar archive on standard output. `path`: below its working directory.
cd "$folder/jobs/$job/files"
[ -e "$path" ] || { say "the job's working directory has no $path. It has: $(ls -A | head -n 20 | tr '\n' ' ')"; exit 10; }
tar -cf - -- "$path"
