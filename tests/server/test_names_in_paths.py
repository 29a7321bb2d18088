"""Names from clients that become part of a path: each parser accepts only a single path segment."""

from __future__ import annotations

import json
from pathlib import PurePosixPath, PureWindowsPath

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from djinn.testing import open_permitted
from djinn_client.runtime.connecting.logins import is_login_name
from djinn_client.runtime.planning.calibrations import calibration_file
from djinn_commands.connect.records import is_server_name
from djinn_core.errors import ConfigurationError, WeightsUnavailable
from djinn_core.wire.messages import DeviceInfo
from djinn_jwt.authenticator import _TENANT as JWT_TENANT
from djinn_server.builtins.weights import FileSource
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.weight_sources import WeightPermissions
from djinn_server.launch.token_table import check_tenant, parse_table
from djinn_server.recovery.journal import journal_path
from djinn_server.weights.permissions import resolve_new
from djinn_server.weights.saving import SavedBytes
from djinn_server.weights.weight_reader import WeightReader
from djinn_weights.hub import HubSource, parse
from djinn_weights.published import PublishedWeights

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
def published_weights(tmp_path_factory):
    source = PublishedWeights(60.0)
    folder = tmp_path_factory.mktemp("published")
    source.keep_in(folder, SavedBytes(DiskQuota(), folder))
    return source


def accepts_published(published_weights, name):
    try:
        published_weights.publish(f"published:{name}", 1, 0.0).discard()
    except WeightsUnavailable:
        return False
    return True


@given(texts)
@example("..")
@example("a\n")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_accepted_name_is_a_single_path_segment(published_weights, tmp_path_factory, name):
    accepted = {
        "tenant": accepts_tenant(name),
        "tenant of a table": accepts_tenant_of_a_table(name),
        "tenant of a JSON web token": JWT_TENANT.fullmatch(name) is not None,
        "log-in": is_login_name(name),
        "server of djinn connect": is_server_name(name),
        "session": journal_path(tmp_path_factory.getbasetemp(), name) is not None,
        "published": accepts_published(published_weights, name),
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
def test_calibration_file_stays_in_the_cache_directory(kind, name):
    expected = calibration_file(DeviceInfo("0", "cpu")).parent
    found = calibration_file(DeviceInfo("0", kind, name))
    assert found.parent == expected
    assert found.suffix == ".json"


class RecordingSource:
    """Weight source that records the requested addresses."""

    name = "any"

    def __init__(self):
        self.asked = []

    def places(self, address, folders):
        self.asked.append(address)
        return []


@pytest.mark.parametrize(
    "rest", ["x@../y", "x@..", "//x@..", "x?..", "x/..?y", "..#", "x&v=..", "x:..", "..", "%2e%2e/x"]
)
def test_weight_reader_refuses_parent_folders_in_addresses(rest):
    source = RecordingSource()
    with pytest.raises(WeightsUnavailable):
        WeightReader([source]).open(f"any:{rest}")
    assert not source.asked
    with pytest.raises(WeightsUnavailable):
        WeightReader([source]).open("any:x..y/v1..2/...z")
    assert source.asked


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a hub cache that also has files outside of the model's snapshots."""
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
def test_hub_address_leads_to_a_snapshot_or_raises(cache, name, revision, path):
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
def test_hub_parser_refuses_unsafe_addresses(address):
    with pytest.raises(WeightsUnavailable):
        parse(address)


@given(texts)
@example("../secret")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_saved_file_lies_in_the_saving_folder(tmp_path, text):
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


def test_resolve_new_refuses_a_path_that_ends_in_dots(tmp_path):
    with pytest.raises(WeightsUnavailable):
        resolve_new(WeightPermissions(saving=(tmp_path,)), tmp_path / "..")
