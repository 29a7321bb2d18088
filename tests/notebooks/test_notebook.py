"""Djinn in a notebook: a real kernel runs the cells, and what it shows is what people see."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

CELLS = {
    "load": "%load_ext djinn\nimport torch, djinn",
    "none yet": "%djinn_status",
    "tensor": "x = torch.arange(12.0, device='remote_accelerator:0').reshape(3, 4)\nx",
    "view": "x[1]",
    "parameter": "torch.nn.Parameter(x)",
    "wrong shapes": "def multiply(a):\n    return a @ torch.ones(3, device=a.device)\nmultiply(x)",
    "wrong index": "lost = x[torch.tensor([9]).to(x.device)]\nlost",
    "status": "%djinn_status",
    "profile": "%%djinn_profile -o found\n(x @ x.T).sum().item()",
    "profile nowhere": "%%djinn_profile --save /dev/null/trace.json\nprint('it ran')",
    "profile with await": "%%djinn_profile\nimport asyncio\nawait asyncio.sleep(0)\nprint('it ran')",
    "profile an error": "%%djinn_profile\nx.sum().item()\nraise KeyError('mine')",
    "progress": """
from djinn_client.runtime import client
bar, = [s.observer for s in client.context.observers.feeds if s.observer.name == "upload_progress"]
bar._patience = 0.0
torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).to(x.device)
None
""",
    "state": "djinn.compat.get_runtime_state()",
}

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def outputs(python, plain_environment, tmp_path_factory):
    """Return the outputs of the cells by name. The kernel is forked."""
    for name in ("ipykernel", "nbclient", "nbformat"):
        pytest.importorskip(name, reason=f"{name} is not installed (the extra notebooks)")
    import nbclient
    import nbformat
    from traitlets.config import Config

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    folder = tmp_path_factory.mktemp("jupyter")
    kernel = folder / "kernels" / "forked"
    kernel.mkdir(parents=True)
    python.write_executable(kernel / "python")
    started = [str(kernel / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": started, "display_name": "forked", "language": "python"}))
    private = Config(KernelManager={"transport": "ipc"})
    options = {"config": private, "kernel_name": "forked", "timeout": 600, "allow_errors": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        nbclient.NotebookClient(notebook, **options).execute(env=plain_environment)
    return dict(zip(CELLS, [cell.outputs for cell in notebook.cells], strict=True))


def text_of(outputs) -> str:
    shown = [o.get("text") or "\n".join(o.get("traceback", ())) or o.data.get("text/plain", "") for o in outputs]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(shown))


def test_tensor_display_is_short(outputs):
    (shown,) = outputs["tensor"]
    assert shown.data["text/plain"].startswith("tensor([[ 0.,  1.,  2.,  3.],")
    assert "remote_accelerator:0: cpu:0 of this program's own executor" in shown.data["text/html"].replace(
        "&#x27;", "'"
    )
    assert "float32[3, 4] · 48 B of memory" in shown.data["text/html"]
    (view,) = outputs["view"]
    assert "float32[4] · views 16 B of 48 B of memory" in view.data["text/html"]
    (parameter,) = outputs["parameter"]
    assert parameter.data["text/plain"].startswith("Parameter containing:\ntensor(")


def test_errors_show_cell_lines(outputs):
    mistake, (failed,) = text_of(outputs["wrong shapes"]), outputs["wrong index"]
    assert mistake.count("\n") < 15
    assert "djinn_core" not in mistake + text_of([failed])
    assert re.search(r"issued at Cell In\[\d+\]:1 in <module>", failed.evalue), failed.evalue


def test_status_magic_shows_executor(outputs):
    assert "the first use of the device starts one" in text_of(outputs["none yet"])
    assert re.search(r"own executor: cpu:0 .*\n +[1-9]\d* values, ", text_of(outputs["status"]))


def test_profile_magic_profiles_cell(outputs):
    shown = text_of(outputs["profile"])
    assert "1134.0" in shown
    (table,) = [o.data["text/html"] for o in outputs["profile"] if "text/html" in o.get("data", ())]
    assert "round trip" in table
    assert re.search(r"Cell In\[\d+\]:1 in", table)
    assert "ipykernel_" not in table


def test_profile_magic_reports_failing_and_refused_cells(outputs):
    refused = text_of(outputs["profile nowhere"]) + text_of(outputs["profile with await"])
    assert "there can be no folder '/dev/null' for the trace" in refused
    assert "`with djinn.profile() as prof:`" in refused
    assert "it ran" not in refused
    failed = outputs["profile an error"]
    assert "KeyError: 'mine'" in text_of(failed)
    assert any("1 round trips" in o.data.get("text/html", "") for o in failed if "data" in o)


def test_upload_progress_is_shown_and_removed(outputs):
    (bar,) = outputs["progress"]
    assert bar.output_type == "display_data"
    assert not bar.data["text/html"], "it goes when the upload has ended"
    assert bar.data.keys() == {"text/plain", "text/html"}


def test_small_session_state_is_shown_briefly(outputs):
    assert len(text_of(outputs["state"])) < 1000


def test_core_does_not_import_ipython(python, plain_environment):
    program = "import sys, torch, djinn; torch.ones(2, device='remote_accelerator:0').sum().item(); print('IPython' in sys.modules)"
    ran = python.run("-c", program, env=plain_environment, capture_output=True, text=True)
    assert ran.stdout == "False\n", ran.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_notebooks_ran_without_error(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for cell in cells for output in cell["outputs"]} <= {
        "stream",
        "execute_result",
        "display_data",
    }
    assert not re.search(r"/(?:home|root|tmp|work)/", path.read_text()), "outputs have no paths of the machine"
