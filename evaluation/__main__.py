"""Run the program NAME: `python -m evaluation NAME [ARGS]`. Without a name, list all programs."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping

import attrs

from evaluation import ROOT
from evaluation.environments import Layer

QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
RAY = Layer("ray", ("-e", "./plugins/ray[ray]"))
UCX = Layer("ucx", ("-e", "./plugins/ucx[ucx]"))
# Not locked, because no s3fs may exist yet for the locked fsspec.
BUCKETS = Layer("buckets", ("-e", "./plugins/weights[test]"))
LIBRARIES = Layer("libraries", ("-e", ".[libraries]"), locked=True)
NOTEBOOKS = Layer("notebooks", ("-e", ".[notebooks]"), locked=True)
TIDY = Layer("tidy", ("clang-tidy>=20",), locked=True)

# tests of executors without a CPU device
FAKEGPU = (
    "plugins/fakegpu",
    "tests/e2e",
    "tests/models",
    "tests/server/test_cancellation.py",
    "tests/server/test_kill.py",
    "tests/server/test_relay.py",
)


@attrs.frozen
class Program:
    """A program of the list.

    Attributes:
        command: arguments of Python, before those of the command line.
        summary: one line for the list.
        default: arguments if the command line has none.
        variables: environment variables of the process.
        layer: virtual environment that the program needs. None selects the current environment.
    """

    command: tuple[str, ...]
    summary: str
    default: tuple[str, ...] = ()
    variables: Mapping[str, str] = QUIET
    layer: Layer | None = None


def _module(
    name: str,
    *given: str,
    summary: str,
    default: tuple[str, ...] = (),
    variables: Mapping[str, str] = QUIET,
    layer: Layer | None = None,
) -> Program:
    """Return a program of this package, which runs with library warnings disabled."""
    return Program(("-W", "ignore", "-m", f"evaluation.{name}", *given), summary, default, variables, layer)


def _tests(*paths: str, summary: str, variables: Mapping[str, str] = QUIET, layer: Layer | None = None) -> Program:
    """Return a program that runs tests that are not in the usual suite: they need a package or a variable, or take long."""
    return Program(("-m", "pytest", *paths), summary, variables=variables, layer=layer)


PROGRAMS: Mapping[str, Program] = {
    # --- equality with local PyTorch
    "conformance": _module("conformance.run_databases", summary="PyTorch's databases of ops, modules and optimizers, called in every way"),
    "conformance-pool": _module(
        "conformance.run_databases", "--executors", "2", "--policy", "round_robin", "--samples", "4",
        summary="the same over two executors as one device, placed blindly",
    ),
    "conformance-index": _module(
        "conformance.run_databases", "--executors", "2", "--index", "2", "--samples", "4",
        summary="the same on the second of two executors, by its index",
    ),
    "differential": Program(
        ("-m", "evaluation.differential.run_differential"),  # without `-W ignore`, because it compares warnings
        "random programs, and ops on inputs of any layout: everything that a program can see of them",
        default=("--programs", "2000", "--ops"),
    ),
    "zoo": _module("zoo.run_zoo", summary="models of many architectures, here and on a server"),
    "torchvision": _module("detection.run_detection", summary="detection models of torchvision, here and on a server; or torchvision's own op tests"),
    "curves": _module("zoo.run_curves", summary="training runs of 200 steps with every optimizer, here and on a server; minutes"),
    "pytorch": _module("pytorch.run_pytorch_tests", summary="PyTorch's own tests, from the folder of its unpacked source"),
    "transformers": _module(
        "pytorch.run_pytorch_tests", "--families", "--results", "build/transformers-tests",
        summary="Hugging Face's common model tests, from the folder of the unpacked source of transformers",
    ),
    "gpu": _module("gpu.run_gpu", summary="everything that needs a GPU, and a report to send", variables={}),
    "decoding": _module("fakegpu.run_families", summary="launches for each decoded token, by family of transformers, with and without graphs"),
    "fakegpu": _module("fakegpu.run_fakegpu", summary="synchronisations, copies and page-locked memory, by the counters of a simulated GPU"),
    # --- recognition, planning, prediction
    "semantics": _module("semantics.run_semantics", summary="accuracy of the semantic layer on the labelled zoo"),
    "ablation": _module("ablation.run_ablation", summary="each pattern and optimization switched off in turn, for every program that it matches"),
    "scenarios": _module("ablation.scenarios", summary="programs for which several executors should pay, on the simulated clock"),
    "clusters": _module("clusters.run_clusters", "--json", summary="programs planned for random clusters with every placement policy"),
    "fit": _module("benchmarks.bench_fit", summary="memory that `djinn plan` says models need, against what an executor held"),
    # --- faults and load
    "chaos": _module("chaos.run_chaos", "--json", summary="kill executors at random moments of generation and training"),
    "device-faults": _module(
        "chaos.run_device_faults", summary="sticky errors, hung kernels and out of memory at random ops of devices that behave like GPUs",
    ),
    "endings": _module("chaos.run_endings", summary="programs that end at random moments, and the next one that waits for the place"),
    "idle": _module("chaos.run_idle", "--json", summary="twenty idle sessions where three fit, and an executor that is killed meanwhile"),
    "interrupts": _module("chaos.run_interrupts", summary="Ctrl-C, and again, at random moments of training, generation, upload and planning"),
    "ray-kills": _module("chaos.run_ray_kills", summary="kill executors, actors and nodes of a Ray cluster; installs Ray", layer=RAY),
    "fuzz": _module("fuzz.run_fuzz", "--json", summary="malformed input, mutations of real work on a live executor, bad arguments for ops"),
    "hostile-ops": _module("fuzz.hostile_ops", summary="ops with hostile arguments, and programs of them, beside tensors that stay"),
    "link-faults": _module("chaos.run_link_faults", summary="a training loop over lost packets, a slow uplink, a client that sleeps, a link that goes down, another address; root"),
    "op-names": _module("fuzz.op_names", summary="ops that a server did not allow, named in every spelling over a real connection"),
    "load": _module("load.run_load", summary="many clients, long work, sessions that are dropped"),
    # --- speed
    "rivals": _module("rivals.run_rivals", summary="programs that rivals publish, over links of 0 to 116 ms, beside the rivals' figures; root"),
    "bench": _module("benchmarks.run_all", summary="all benchmarks, a picture and a line of history", variables={}),
    "bench-ucx": _module("benchmarks.bench_ucx", summary="UCX beside TCP; installs UCX", variables={}, layer=UCX),
    "paired": _module("benchmarks.paired", summary="processor time of two checkouts", variables={}),
    # --- tests with additional packages
    "libraries": _tests("tests/libraries", summary="programs of twelve libraries; installs four", variables=QUIET | {"LONG_FORMS": "1"}, layer=LIBRARIES),
    "ray": _tests("plugins/ray", summary="executors on a Ray cluster of three nodes on this machine; installs Ray", variables={"OMP_NUM_THREADS": "1"}, layer=RAY),
    "ucx": _tests("plugins/ucx", summary="the transport over UCX, and transfers that break; installs UCX", variables={"OMP_NUM_THREADS": "1"}, layer=UCX),
    "buckets": _tests("plugins/weights/tests/test_buckets.py", "plugins/weights/tests/test_https.py", summary="weights in buckets of an S3 server on this machine; installs s3fs and moto", variables={"OMP_NUM_THREADS": "1"}, layer=BUCKETS),
    "fakegpu-suite": _tests(*FAKEGPU, summary="tests of executors on a device that behaves like a GPU", variables=QUIET | {"SERVED_DEVICE": "fakegpu"}),
    "connect": _tests("plugins/commands/tests/test_sshd.py", summary="djinn connect and djinn submit against OpenSSH's server; root", variables={"TEST_CONNECT": "1"}),
    "dashboard": _tests(
        "plugins/observability/tests/test_browser.py", summary="the dashboard in a browser; needs playwright and Chromium",
        variables=QUIET | {"DASHBOARD_PICTURES": str(ROOT / "build" / "dashboard")},
    ),
    "documents": _tests("tests/repository/test_commands.py", "tests/repository/test_documents.py", summary="the commands of all documents", variables={"ALL_DOCUMENTS": "1"}),
    "notebooks": _module("notebooks.run_notebooks", summary="the notebooks of examples/; installs Jupyter's kernel", variables={}, layer=NOTEBOOKS),
    # --- platforms and C++
    "simulated": _module("simulated.run_simulated", summary="tests of clients as on macOS and on Windows, in short; or `darwin`, or `windows`", variables={}),
    "matrix": _module("matrix.run_matrix", summary="the suite on each Python from 3.11 to 3.14 that is found here", variables={}),
    "clang-tidy": _module("native.run_tidy", summary="clang-tidy on the C++ of djinn_native; installs it", variables={}, layer=TIDY),
    "sanitizers": _module("native.run_sanitizers", summary="random programs on djinn_native under address and undefined-behaviour sanitizers", variables={}),
}  # fmt: skip


def main() -> None:
    """Replace this process by the named program."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in {"-h", "--help"}:
        print("python -m evaluation NAME [ARGS]   (`python -m evaluation NAME --help` for the arguments)\n")
        for name, program in PROGRAMS.items():
            print(f"  {name:18} {program.summary}")
        return
    if name not in PROGRAMS:
        near = difflib.get_close_matches(name, PROGRAMS)
        also = f"; did you mean {' or '.join(near)}?" if near else ""
        sys.exit(f"there is no evaluation `{name}`{also} `python -m evaluation` lists them")
    program = PROGRAMS[name]
    python = sys.executable if program.layer is None else program.layer.python()
    command = [python, *program.command, *(arguments or program.default)]
    os.chdir(ROOT)
    os.execve(python, command, os.environ | program.variables)


if __name__ == "__main__":
    main()
