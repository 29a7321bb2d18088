"""Text of clients that becomes part of a path: each parser accepts a plain name of one file or folder, or refuses the text."""

from __future__ import annotations

import json
from pathlib import PurePosixPath, PureWindowsPath

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from djinn_connect.records import is_server_name
from djinn_core.builtins.weights import FileSource
from djinn_core.errors import ConfigurationError, WeightsUnavailable
from djinn_core.hookspecs.weights import WeightPermissions
from djinn_core.launch.logins import is_login_name
from djinn_core.launch.token_table import check_tenant, parse_table
from djinn_core.runtime.planning.calibrations import calibration_file
from djinn_core.server.disk_quota import DiskQuota
from djinn_core.server.recovery.journal import journal_path
from djinn_core.server.weights.permitted_places import open_permitted
from djinn_core.server.weights.published import PublishedWeights
from djinn_core.server.weights.weight_reader import WeightReader
from djinn_core.wire.messages import DeviceInfo
from djinn_hub import HubSource, parse
from djinn_jwt.authenticator import _TENANT as JWT_TENANT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PARTS = (
    "..",
    ".",
    "/",
    "\\",
    "%2e",
    "%2f",
    "@",
    ":",
    "?",
    "#",
    "\0",
    "\n",
    " ",
    "~",
    "a",
    "org",
    "refs",
    "blobs",
    "main",
    COMMIT,
)
texts = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)


def accepts_tenant(name):
    try:
        check_tenant(name)
    except ConfigurationError:
        return False
    return True


def accepts_tenant_of_a_table(name):
    row = {"id": "1", "tenant": name, "digest": "0", "created": 0.0}
    try:
        parse_table(json.dumps({"tokens": [row]}).encode(), PurePosixPath("tokens.json"))
    except ConfigurationError:
        return False
    return True


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return PublishedWeights(tmp_path_factory.mktemp("published"), 60.0, DiskQuota(), "")


def accepts_published(published, name):
    try:
        published.create(f"published:{name}", 1, 0.0).discard()
    except WeightsUnavailable:
        return False
    return True


@given(texts)
@example("..")
@example("a\n")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_name_that_is_accepted_is_one_segment_of_a_path(published, tmp_path_factory, name):
    accepted = {
        "tenant": accepts_tenant(name),
        "tenant of a table": accepts_tenant_of_a_table(name),
        "tenant of a JSON web token": JWT_TENANT.fullmatch(name) is not None,
        "log-in": is_login_name(name),
        "server of djinn connect": is_server_name(name),
        "session": journal_path(tmp_path_factory.getbasetemp(), name) is not None,
        "published": accepts_published(published, name),
    }
    plain = (
        name not in {".", ".."}
        and PurePosixPath(name).parts == (name,) == PureWindowsPath(name).parts
        and name.isprintable()
        and not name.isspace()
    )
    assert plain or not any(accepted.values()), accepted


@given(texts, texts)
@example("../../x", "")
@settings(deadline=None)
def test_a_calibration_of_a_server_s_device_is_a_file_in_the_client_s_cache(kind, name):
    expected = calibration_file(DeviceInfo("0", "cpu")).parent
    found = calibration_file(DeviceInfo("0", kind, name))
    assert found.parent == expected
    assert found.suffix == ".json"


class Recording:
    """A weight source that keeps the addresses that it is asked for."""

    name = "any"

    def __init__(self):
        self.asked = []

    def places(self, address, folders):
        self.asked.append(address)
        return []


@pytest.mark.parametrize(
    "rest", ["x@../y", "x@..", "//x@..", "x?..", "x/..?y", "..#", "x&v=..", "x:..", "..", "%2e%2e/x"]
)
def test_no_weight_source_sees_a_parent_folder_in_an_address(rest):
    source = Recording()
    with pytest.raises(WeightsUnavailable):
        WeightReader([source]).open(f"any:{rest}")
    assert not source.asked
    with pytest.raises(WeightsUnavailable):
        WeightReader([source]).open("any:x..y/v1..2/...z")
    assert source.asked


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of the hub with files of other models, and of the model outside of its snapshots."""
    cache = tmp_path_factory.mktemp("cache")
    model = cache / "models--org--a"
    for folder in ("", "models--org--a", "models--org--a/blobs", "models--org--a/refs", "models--org--a/snapshots"):
        (cache / folder).mkdir(parents=True, exist_ok=True)
        (cache / folder / "a").write_bytes(b"secret")
    (model / "snapshots" / COMMIT).mkdir()
    (model / "snapshots" / COMMIT / "a").write_bytes(b"weights")
    (model / "refs" / "main").write_text(COMMIT)
    return cache


@given(texts, texts, texts)
@example("org/a", "..", "blobs/a")
@example("org/a", "..", "a")
@example("org/a", ".", "a")
@example("org/a", COMMIT, "../a")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_an_address_on_the_hub_leads_to_a_snapshot_or_nowhere(cache, name, revision, path):
    permissions = WeightPermissions((cache,), suffixes=("a",))
    try:
        found = open_permitted(HubSource(cache / "nowhere"), f"hf://{name}@{revision}/{path}", permissions)
    except WeightsUnavailable:
        return
    for file in found:
        data = bytearray(file.size)
        file.read_into(0, memoryview(data))
        assert data == b"weights"


@pytest.mark.parametrize(
    "address",
    [
        "hf://org/a@..",
        "hf://org/a@../blobs/a",
        "hf://org/a@.",
        "hf://org/a@./a",
        "hf://org/a@",
        "hf://org/a@/a",
        "hf://org/a@%2e%2e/a",
        "hf://org/a@main\\..\\a",
        "hf://org/a@ma?in/a",
        "hf://org/a@main/../a",
        "hf://org/a@main/./a",
        "hf://org/a@main//a",
        "hf://org/a@main/a\0",
        "hf://org/..@main",
        "hf://org/./a",
        "hf://../a@main",
        "hf://org/a@v1@v2/a",
        "hf://-org/a@main",
    ],
)
def test_the_parser_of_the_hub_refuses(address):
    with pytest.raises(WeightsUnavailable):
        parse(address)


@given(texts)
@example("../secret")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_file_that_is_written_lies_in_the_folder_for_saving(tmp_path, text):
    folder = tmp_path / "saved"
    folder.mkdir(exist_ok=True)
    permissions = WeightPermissions(saving=(folder,))
    try:
        sink = WeightReader([FileSource()], permissions).create(f"file:{text}.safetensors", 1)
    except WeightsUnavailable:
        return
    try:
        assert sink.path.resolve().is_relative_to(folder.resolve())
    finally:
        sink.discard()


def test_a_path_that_ends_in_a_parent_folder_is_not_written(tmp_path):
    with pytest.raises(WeightsUnavailable):
        WeightPermissions(saving=(tmp_path,)).resolve_new(tmp_path / "..")
