"""The parent process of a job, on the remote machine.

The client sends this file with each job. It needs only Python's standard library and filelock. It runs in the job's folder, in its
own process session, and records the job's progress in files:

- `job.json`, sent by the client: the script, its arguments and requirements. `files/`: the project's files, the working directory.
- `log`: the job's output. `pid`: id of this process. `state`: `preparing`, then `running`.
- `ended`, written at the end: Unix time in seconds and exit status.
- `stop`: created by `djinn stop`, to distinguish a stop from a failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def write(name: str, text: str) -> None:
    """Write a file in the working directory atomically."""
    aside = Path(f".{name}.new")
    aside.write_text(text)
    aside.replace(name)


def log_line(text: str) -> None:
    """Write a line to the job's log."""
    sys.stdout.write(f"[djinn] {text}\n")
    sys.stdout.flush()


def named_files(requirements: list[str]) -> list[Path]:
    """Return the project files that requirement lines name: wheels, nested lists (`-r`, `-c`), and files named in these lists.

    `requirements`: requirement lines of the project.
    """
    paths: list[Path] = []
    lines = [(line, Path("files")) for line in requirements]
    for line, beside in lines:
        match = re.match(r"(?:-[rc]|--requirement|--constraint)[ =]*(\S+)", line)
        path = Path(os.path.normpath(beside / match[1])) if match else Path("files", line)
        if path.is_file() and path not in paths:
            paths.append(path)
            if match:
                lines += [(further, path.parent) for further in path.read_text().splitlines()]
    return paths


def environment(job: dict[str, Any], folder: Path) -> Path:
    """Return the path of the Python that runs the job.

    A job without requirements uses the server's Python. Otherwise it uses an environment with the requirements on top of the
    server's packages. Jobs with equal requirements share one environment.

    Args:
        job: the content of `job.json`.
        folder: Djinn's folder on this machine.
    """
    base = Path(sys.executable)
    requirements = job["requirements"]
    if not requirements:
        return base
    from filelock import FileLock

    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in named_files(requirements)]
    name = hashlib.sha256(json.dumps([sys.version, str(base), requirements, contents]).encode()).hexdigest()[:16]
    place = folder / "environments" / name
    place.parent.mkdir(mode=0o700, exist_ok=True)
    python = place / "bin" / "python"
    with FileLock(f"{place}.lock"):
        if not (place / "complete").exists():
            log_line("creating the environment for the project's requirements; later jobs reuse it")
            command: list[str | Path] = [base, "-m", "venv", "--clear", "--without-pip", place]
            subprocess.run(command, check=True)
            ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
            below, own = (subprocess.check_output([one, "-c", ask], text=True).strip() for one in (base, python))
            # After the environment's own packages: PyTorch and Djinn stay the server's.
            Path(own, "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
            # Next to the project's own list, because paths in it are relative.
            list_path = Path("files", f".djinn-{name}.txt").absolute()
            list_path.write_text("\n".join(requirements) + "\n")
            torch = subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"], text=True).strip()
            (place / "constraints.txt").write_text(f"torch=={torch}\n")
            options: list[str | Path] = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
            options += ["--constraint", place / "constraints.txt", "--requirement", list_path]
            subprocess.run([python, "-m", "pip", "install", *options], check=True, cwd="files")
            list_path.unlink()
            (place / "complete").touch()
    return python


def name_server(job: dict[str, Any], connection: Path) -> None:
    """Create a log-in with the client's name for the server, so that this name works in scripts on both machines.

    `connection`: the server's connection file, to which the log-in becomes a link.
    """
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    link = base / "djinn" / "servers" / f"{job['server']}.json"
    if not link.exists() and not link.is_symlink():
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        link.symlink_to(connection)


def main() -> None:
    """Run the job whose folder is the working directory, and record its exit status."""
    job = json.loads(Path("job.json").read_text())
    folder = Path.cwd().parents[1]
    write("pid", f"{os.getpid()}\n")
    result = {"code": 1}

    def finish() -> None:
        write("ended", f"{int(time.time())} {result['code']}\n")

    def stop(*_: object) -> None:
        result["code"] = 128 + signal.SIGTERM
        finish()
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, stop)
    try:
        python = environment(job, folder)
        connection = folder / "server" / "connection.json"
        name_server(job, connection)
        files = Path("files").resolve()
        paths = [str(files / "src"), str(files), os.environ.get("PYTHONPATH", "")]
        variables = os.environ | {
            "DJINN_CONNECTION_FILE": str(connection),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
        }
        write("state", "running\n")
        child = subprocess.Popen([python, job["script"], *job["arguments"]], cwd=files, env=variables)
        # The child gets the signal of its group as well, and may need a moment.
        signal.signal(signal.SIGTERM, lambda *_: None)
        code = child.wait()
        result["code"] = code if code >= 0 else 128 - code
    except subprocess.CalledProcessError as error:
        log_line(
            f"the environment for the requirements cannot be created: {Path(error.cmd[0]).name} ended with exit status {error.returncode}. "
            "Correct the project's requirements and submit the job again"
        )
    finally:
        finish()


if __name__ == "__main__":
    main()
