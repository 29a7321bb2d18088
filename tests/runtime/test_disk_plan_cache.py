"""Plans are kept on disk: a later process makes none for the same programs, and a file that says other things harms nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

import djinn
from djinn_client.runtime import client
from djinn_client.runtime.planning import disk_plan_cache, planner

pytestmark = pytest.mark.usefixtures("forked_processes")

DEVICE = "remote_accelerator:0"


@pytest.fixture
def folder(embedded, tmp_path, monkeypatch):
    """The directory of plans. A change of the setting begins with what is on disk, as another process does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(planner, "UNPLANNED_RUNS", 1)
    yield tmp_path / "djinn" / "plans"
    djinn.configure(keep_plans=False)


def anew() -> None:
    djinn.configure(keep_plans=False)
    djinn.configure(keep_plans=True)
    djinn.reset_stats()


def program(rows: int) -> list[float]:
    """Twice the same sum, of which a plan makes one, and values of three kinds."""
    x = (torch.arange(rows * 8.0).reshape(rows, 8) / 7).to(DEVICE)
    w = torch.linspace(-1, 1, 64).reshape(8, 8).to(DEVICE)
    found = ((x @ w + 1) * (x @ w + 1)).softmax(-1).sum(0)
    return found.cpu().tolist()


def run(rows: int) -> tuple[list[float], dict[str, int]]:
    """The program three times, of which the second plans it, and the counts."""
    found = [program(rows) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    return found[0], djinn.stats()


def file_in(folder: Path) -> Path:
    (file,) = folder.glob("*.plans")
    return file


def test_a_later_process_plans_nothing_also_for_other_sizes(folder):
    anew()
    want, made = run(6)
    assert (made["plans_made"], made["plans_restored"]) == (1, 0)
    anew()
    assert folder.stat().st_mode & 0o777 == 0o700
    got, restored = run(6)
    assert got == want
    # A tiny program is looked for on disk when its runs as it was recorded are over.
    assert (restored["plans_made"], restored["plans_restored"], restored["programs_unplanned"]) == (0, 1, 1)
    assert djinn.last_profile() is not None
    anew()
    assert run(11)[1]["plans_made"] == 0
    assert run(6)[0] == want


def test_sizes_beyond_the_range_and_other_settings_are_planned(folder):
    anew()
    run(6)
    anew()
    assert run(600)[1]["plans_made"] == 1
    djinn.configure(exact=False)
    djinn.reset_stats()
    try:
        assert run(6)[1]["plans_restored"] == 0
    finally:
        djinn.configure(exact=True)


def changes(plan: disk_plan_cache.DiskPlan) -> dict[str, dict[str, object]]:
    return {
        "nodes": {"nodes": plan.nodes[::-1] or (9999,)},
        "positions": {"replace": ((10**6, 0),)},
        "negative": {"replace": ((-1, 0),)},
        "letters": {"letters": "?" * len(plan.letters)},
        "dtype": {"metas": tuple(msgspec.structs.replace(m, dtype="os.system") for m in plan.metas)},
        "slots": {"fixed": ((99, 1),)},
        "equal": {"equal_slots": ((0, 99),)},
        "none": {"replace": (), "nodes": ()},
    }


def test_a_plan_that_is_none_is_not_used(folder):
    anew()
    want, _ = run(6)
    djinn.configure(keep_plans=False)
    file = file_in(folder)
    ((key, (plan,)),) = disk_plan_cache._read(file)
    for what, fields in changes(plan).items():
        plans = [(key, (msgspec.structs.replace(plan, **fields),))]
        content = disk_plan_cache._encoder.encode(disk_plan_cache._File(disk_plan_cache.FORMAT, plans))
        djinn.configure(keep_plans=False)  # which writes what was made
        file.write_bytes(disk_plan_cache._MAGIC + disk_plan_cache._checksum(content) + content)
        anew()
        assert (program(6), program(6)) == (want, want), what
        assert (djinn.stats()["plans_made"], djinn.stats()["plans_restored"]) == (1, 0), what


def test_a_file_that_is_damaged_or_not_ours_is_not_read(folder, tmp_path):
    anew()
    want, _ = run(6)
    djinn.configure(keep_plans=False)
    file = file_in(folder)
    content = file.read_bytes()
    assert disk_plan_cache._read(file)
    for damaged in (content[:-3], content[:60] + bytes([content[60] ^ 1]) + content[61:], b"\x93" * 1000, b""):
        file.write_bytes(damaged)
        assert not disk_plan_cache._read(file)
    file.write_bytes(content)
    file.chmod(0o666)
    assert not disk_plan_cache._read(file)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert not disk_plan_cache._read(file)
    anew()
    assert run(6)[0] == want


def test_where_nothing_can_be_written_nothing_is_kept(folder, tmp_path):
    (tmp_path / "djinn").mkdir()
    (tmp_path / "djinn" / "plans").write_text("a file in the place of the directory")
    anew()
    assert run(6)[1]["plans_made"] == 1
    anew()
    assert run(6)[1]["plans_made"] == 1


def test_files_and_plans_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(disk_plan_cache, "FILES_LIMIT", 2)
    monkeypatch.setattr(disk_plan_cache, "PLANS_LIMIT", 1)
    folder.mkdir(mode=0o700, parents=True)
    for number in range(4):
        (folder / f"{number}.plans").write_bytes(b"")
    anew()
    run(6)
    torch.ones(5).to(DEVICE).cumsum(0).exp().cpu()
    torch.ones(5).to(DEVICE).cumsum(0).exp().cpu()
    assert len(client.context.plans._disk_plans._own) == 1
    djinn.configure(keep_plans=False)
    assert len(list(folder.glob("*.plans"))) == 2
    ((_, plans),) = disk_plan_cache._read(max(folder.glob("*.plans"), key=lambda file: file.stat().st_size))
    assert len(plans) == 1
