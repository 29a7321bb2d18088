# Ends a job with all its processes.
cd "$folder/jobs/$job"
if [ ! -s ended ] && alive pid "$folder/jobs/$job/"; then
    : >stop
    group=$number
    kill -TERM "-$group"
    waited=0
    while alive pid "$folder/jobs/$job/" && [ "$waited" -lt "$seconds" ]; do
        sleep 1
        waited=$((waited + 1))
    done
    if alive pid "$folder/jobs/$job/"; then
        kill -KILL "-$group"
        echo "$(date +%s) 137" >ended
    fi
fi
