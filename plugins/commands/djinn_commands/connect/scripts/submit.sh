# Takes a job, as a tar archive on standard input, and starts it. `job`: its name.
python=$environment/bin/python
[ -x "$python" ] || { say "there is no environment at $python: create it with djinn connect"; exit 8; }
mkdir -p "$folder/jobs"
cd "$folder/jobs"
rm -rf "$job.new"
mkdir "$job.new"
(cd "$job.new" && tar -xf - && [ -e whole ]) || { rm -rf "$job.new"; say "the files did not arrive whole, or the disk is full"; df -Pk . >&2; exit 3; }
mkdir -p "$job.new/files"
[ ! -e "$job" ] || exit 9
mv "$job.new" "$job"
cd "$job"
date +%s >begun
echo preparing >state
nohup "$python" -I -c 'import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])' "$python" "$folder/jobs/$job/job_runner.py" \
    </dev/null >>log 2>&1 &
echo $! >pid
[ -s "$folder/server/connection.json" ] || echo "no server"
