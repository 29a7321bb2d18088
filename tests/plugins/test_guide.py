"""The examples of the author's guide do what it says, and its tables are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

QUIET = "ignore::pytest.PytestAssertRewriteWarning"  # a fork has modules of plugins of pytest imported already

TEXT = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def guide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the guide's example files. The first line of each example is its file name."""
    folder = tmp_path_factory.mktemp("guide")
    for source in re.findall(r"^```python\n(.+?)^```", TEXT, flags=re.MULTILINE | re.DOTALL):
        name = source.splitlines()[0].removeprefix("# ")
        (folder / name).write_text(source, encoding="utf-8")
    return folder


def test_guide_plugin_recognises_pattern(python, plain_environment, guide_folder: Path) -> None:
    done = python.run(guide_folder / "use.py", cwd=guide_folder, env=plain_environment)
    assert done.returncode == 0, done.stderr
    (expected,) = re.findall(r"^```text\n(.+?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert done.stdout == expected


def test_guide_plugin_passes_its_tests(python, plain_environment, guide_folder: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "error", "-W", QUIET]
    done = python.run("-m", "pytest", *options, cwd=guide_folder, env=plain_environment)
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout


def test_guide_plugin_has_settings(python, plain_environment, guide_folder: Path) -> None:
    (script := guide_folder / "count.py").write_text(
        "import djinn\n"
        "from djinn_client.runtime import client\n"
        "djinn.configure(plugins=['counting_plugin'], plugin_settings={'counting_plugin': {'form': 'json'}})\n"
        "(counting,) = [o for o in client.registry().observers if o.name == 'counting']\n"
        "print(counting.settings.every, counting.settings.form)\n"
    )
    environment = plain_environment | {"DJINN_PLUGIN_COUNTING_PLUGIN_EVERY": "10"}
    done = python.run(script, cwd=guide_folder, env=environment)
    assert (done.stdout, done.returncode) == ("10 json\n", 0), done.stderr


def test_guide_channel_wrapper_sees_all_frames(python, plain_environment, guide_folder: Path) -> None:
    (script := guide_folder / "frames.py").write_text(
        "import djinn, torch\n"
        "from djinn_client.runtime import client\n"
        "djinn.configure(plugins=['counting_channel'])\n"
        "assert (torch.arange(3, device='remote_accelerator:0') + 1).tolist() == [1, 2, 3]\n"
        "(counting,) = [one for one in client.registry().channels if one.name == 'counting']\n"
        "assert counting.channel.sent == djinn.stats()['messages_sent'] > 0\n"
    )
    done = python.run(script, cwd=guide_folder, env=plain_environment)
    assert done.returncode == 0, done.stderr


def test_hints_are_listed_with_writer_and_reader() -> None:
    root = Path(__file__).parents[2]
    sources = [path.read_text() for path in (root / "plugins").rglob("djinn_*/**/*.py")]
    read = {name for source in sources for name in re.findall(r"""plan\.hints\.get\("(\w+)\"""", source)}
    guide_folder = {name for source in sources for name in re.findall(r"""hints=\{"(\w+)":""", source)}
    listed = set(re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+ \|$", TEXT, flags=re.MULTILINE))
    assert read == listed
    assert guide_folder == read - {"groups"}  # the core writes those
