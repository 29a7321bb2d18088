# Makes the environment `env`, or completes it. `python`: what it is made with; `requirements`: a line each, relative to `folder`;
# `stamp`: says what is installed, once it is; `offline`: first without an index; `check`: a program that looks at the result.
mkdir -p "$folder"
cd "$folder"
# One installation at a time: an earlier one may go on after its connection broke.
end installing "$folder/" 20 || kill -KILL "$number" 2>/dev/null || :  # nothing is lost: what it left is completed below
end installing "$folder/" 10 || { say "process $(cat installing), an installation of an earlier call, does not end"; exit 4; }
child() {
    "$@" </dev/null &
    echo $! >installing
    code=0
    wait "$(cat installing)" || code=$?
    rm -f installing
    return $code
}
short() {
    say "$1"
    df -Pk "$folder" | awk 'NR == 2 {print "free there: " int($4 / 1024) " MiB of " $6}' >&2
    exit 5
}

if [ "$(env/bin/python -I -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || :)" != "$version" ]; then
    rm -rf env
    fresh=yes
    child "$python" -m venv --without-pip "$folder/env" || short "the environment could not be made with $python"
fi
rm -f env/installed
# pip runs from its wheel, that of this Python or else the one that was sent, and installs itself beside the rest: ensurepip takes seconds.
pip=$(env/bin/python -I -c 'import ensurepip, pathlib; print(*pathlib.Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))' 2>/dev/null || :)
[ -f "$pip" ] || pip=$(echo "$folder"/wheels/pip-*.whl)

printf '%s\n' "$requirements" "$pip" >requirements.txt
install() {
    TMPDIR=$folder/incoming child "$folder/env/bin/python" "$pip/pip" install --disable-pip-version-check --no-input \
        --progress-bar off --no-cache-dir --no-compile --find-links wheels "$@" >install.log 2>&1
}
mkdir -p incoming
index="not asked"
# uv unpacks wheels in a third of pip's time. Which index to ask only pip knows, by its configuration.
PATH=$PATH:$HOME/.local/bin:$HOME/.cargo/bin
unpack() {
    command -v uv >/dev/null 2>&1 || return 1
    TMPDIR=$folder/incoming child uv --no-config --cache-dir "$folder/incoming/uv" pip install --python "$folder/env/bin/python" \
        --offline --no-index --find-links wheels --link-mode hardlink -r requirements.txt >install.log 2>&1
}
if [ "$offline" = yes ] && unpack; then
    index="not asked, by uv"
elif [ "$offline" != yes ] || ! install --no-index -r requirements.txt; then
    index=yes
    if ! install --retries 1 --timeout 20 -r requirements.txt; then
        grep -v '^WARNING: Retrying' install.log | tail -n 12 >&2
        grep -q 'No space left' install.log && short "the disk is full"
        grep -q -e 'NewConnectionError' -e 'ConnectTimeout' -e 'NameResolutionError' -e 'Failed to establish' install.log && exit 6
        grep -q -e 'No matching distribution' install.log && exit 6
        short "pip could not install PyTorch and Djinn"
    fi
fi
# Djinn's own of the same version may have changed.
[ "${fresh:-}" = yes ] || install --no-index --no-deps --force-reinstall wheels/djinn*.whl || { tail -n 8 install.log >&2; short "Djinn could not be installed"; }
echo "index $index"
child "$folder/env/bin/python" -I -c "$check" >env/torch
cat env/torch
find wheels -name '*.whl' ! -name 'djinn*' ! -name 'pip-*' -exec rm -f {} +
rm -rf incoming
echo "$stamp" >env/installed
