# Says what is there, a fact a line; changes nothing. `wanted`: a Python that was named.
echo "os $(uname -s)"
echo "machine $(uname -m)"
if [ -r /etc/os-release ]; then
    (. /etc/os-release && echo "release ${PRETTY_NAME:-}")
fi
echo "libc $(getconf GNU_LIBC_VERSION 2>/dev/null || echo other)"
echo "folder $folder"
there=$folder
while [ ! -d "$there" ]; do there=$(dirname "$there"); done
[ -w "$there" ] || echo "unwritable $there"
df -Pk "$there" | awk 'NR == 2 {print "free_kib " $4}'
awk '/^MemTotal:/ {print "memory_kib " $2}' /proc/meminfo 2>/dev/null || :

tell='import sys; print("%d.%d.%d" % sys.version_info[:3], sys.executable)'
# A shell without a terminal often has a shorter search path than the user.
PATH=$PATH:$HOME/.local/bin:/usr/local/bin:/opt/conda/bin:$HOME/miniconda3/bin:$HOME/.pyenv/shims
set -- python3.14 python3.13 python3.12 python3.11 python3 "$HOME"/.local/share/uv/python/*/bin/python3
[ -z "$wanted" ] || set -- "$wanted"
for name in "$@"; do
    if command -v "$name" >/dev/null 2>&1; then
        found=$("$name" -I -c "$tell" 2>/dev/null) && echo "python $found" || :
    fi
done
PATH=$PATH:/usr/local/nvidia/bin:/usr/lib/wsl/lib
if command -v nvidia-smi >/dev/null 2>&1; then
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null |
        while IFS= read -r line; do echo "gpu $line"; done || :
fi
if [ -r "$folder/env/installed" ]; then
    echo "installed $(cat "$folder/env/installed")"
    cat "$folder/env/torch" 2>/dev/null || :
fi
[ ! -r "$folder/server/options" ] || echo "options $(cat "$folder/server/options")"
