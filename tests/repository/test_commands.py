"""The commands that the documents print run as they are printed, in the order in which they stand there.

Blocks of one document run as one script. A block is left out with a comment on the line before it: `<!-- not run: reason
-->`. What stands for something else here: the ports, which are free ones; a GPU, which is the CPU; and the files of a reader
(`train.py`, `config.json` and so on), which lie in `assumed/`. Python blocks that begin with the name of a file are that file.
A line that serves goes on in the background, once it listens, until the next one that serves or the end.

`python -m evaluation documents` runs the commands of all documents. The suite runs those of some, with `python` and `djinn` forked from a
process that has imported torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
ASSUMED = Path(__file__).parent / "assumed"
DOCUMENTS = sorted(path for pattern in ("*.md", "docs/*.md") for path in ROOT.glob(pattern))
BLOCK = re.compile(r"^(?P<before>[^\n]*)\n```(?:sh|bash|shell|console)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
SKIPPED = re.compile(r"<!-- not run: .{10,} -->")
FILE = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^    (?:[A-Z_]+=\S+ )*(?:djinn|pip|make|ssh|scp|export|python) ", re.MULTILINE)
SERVES = re.compile(r"\bdjinn serve\b")
PORTS = ("5556", "5557", "5558")
# Those of the other documents plan and explain large models, which takes minutes: `python -m evaluation documents` runs them as well.
SHORT = {"README.md", "plugins.md", "security.md"}
EVERYTHING = bool(os.environ.get("ALL_DOCUMENTS"))
SECONDS = 2900 if EVERYTHING else 500
LONG = re.compile(r"llama-8b|explain examples/")  # takes ten seconds; plugins/commands has the same on smaller models

BEGIN = """\
set -eu -o pipefail
stop_serving() {
    if [ -n "${SERVER:-}" ]; then kill -TERM -- "-$SERVER" 2>/dev/null || true; wait "$SERVER" || true; SERVER=; fi
}
serve() {
    stop_serving
    : >serve.log  # what the server before this one wrote must not be taken for its own
    setsid bash -c "$1" >serve.log 2>&1 &
    SERVER=$!
    until grep -q 'Clients on this machine' serve.log; do
        kill -0 "$SERVER" || { cat serve.log >&2; exit 1; }
        sleep 0.2
    done
}
trap stop_serving EXIT
"""


def label(path):
    return str(path.relative_to(ROOT))


def commands(text):
    """The logical lines of the blocks of a document; of equal ones the last, where not everything is run."""
    blocks = [b["code"] for b in BLOCK.finditer(text) if not SKIPPED.search(b["before"])]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    if EVERYTHING:
        return lines
    return [line for i, line in enumerate(lines) if line not in lines[i + 1 :] and not LONG.search(line)]


def script(text):
    """A document's commands for bash."""
    lines, ports = [], {number: free_port() for number in PORTS}
    for line in commands(text):
        command = line.replace("cuda:0", "cpu")
        for number, port in ports.items():
            command = command.replace(number, str(port))
        quoted = command.partition("  #")[0].replace("'", "'\\''")
        lines.append(f"serve '{quoted}'" if SERVES.search(command) else command)
    return BEGIN + "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path, python):
    """A checkout as its reader has it, into which commands may write."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    for entry in ASSUMED.iterdir():
        (shutil.copytree if entry.is_dir() else shutil.copy)(entry, tmp_path / entry.name)
    make_environment(tmp_path / ".venv", python)
    (tmp_path / "home").mkdir()
    return tmp_path


def make_environment(folder, python):
    """The virtual environment, whose `python` and `djinn` are forked where not everything is run."""
    if EVERYTHING:
        folder.symlink_to(sys.prefix)
        return
    (folder / "bin").mkdir(parents=True)
    for name, command in (("python", []), ("djinn", [str(Path(sys.executable).with_name("djinn"))])):
        python.write_executable(folder / "bin" / name, command)


@pytest.fixture
def run(folder, plain_environment):
    """Runs the commands of a document there."""
    places = [str(folder / ".venv" / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    own = {"HOME": str(folder / "home"), "PATH": os.pathsep.join(places)}
    environment = {k: v for k, v in plain_environment.items() if not k.startswith("XDG_") or k == "XDG_CACHE_HOME"}

    def run(text):
        (folder / "run.sh").write_text(script(text))
        options = {"cwd": folder, "env": environment | own, "capture_output": True, "text": True, "timeout": SECONDS}
        return subprocess.run(["bash", "run.sh"], check=False, **options)

    return run


RUN = [path for path in DOCUMENTS if commands(path.read_text()) and (EVERYTHING or path.name in SHORT)]


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.parametrize("path", RUN, ids=label)
def test_documented_commands_run(path, folder, run):
    text = path.read_text()
    for block in FILE.finditer(text):
        (folder / block["name"]).write_text(block["code"])
    done = run(text)
    assert done.returncode == 0, f"{label(path)}: {done.stdout[-1500:]}\n{done.stderr[-1500:]}"


def test_commands_are_in_fenced_blocks():
    outside = {label(p): re.sub(r"^```.*?^```", "", p.read_text(), flags=re.DOTALL | re.MULTILINE) for p in DOCUMENTS}
    found = {name: commands for name, text in outside.items() if (commands := INDENTED.findall(text))}
    assert found == {}, "write them between ```sh and ```, so that they are run"


@pytest.mark.parametrize("line", ["djinn no-such-command", "djinn serve --port no-port  # here"])
def test_failing_command_is_detected(run, line):
    left_out = "<!-- not run: needs a second machine -->\n```sh\ntouch left-out\n```\n"
    done = run(f"{left_out}text\n```sh\n{line}\n```\n")
    assert done.returncode != 0
    assert "no-" in done.stderr


def test_blocks_run_in_order_and_some_are_left_out(run, folder):
    left_out = "<!-- not run: needs a second machine -->\n```sh\ntouch left-out\n```\n"
    done = run(f"text\n```sh\nexport NAME=first\n```\n{left_out}text\n```sh\ntouch $NAME \\\n    second\n```\n")
    assert done.returncode == 0, done.stderr
    assert [name for name in ("first", "second", "left-out") if (folder / name).exists()] == ["first", "second"]
