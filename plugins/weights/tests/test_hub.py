"""Models in a folder with the hub's cache layout: blobs, and links to them."""

from __future__ import annotations

from pathlib import Path

import pytest

import djinn_weights.hub
from djinn.errors import WeightsUnavailable
from djinn.hooks import WeightPermissions
from djinn.testing import PluginConformance, WeightSourceConformance, open_permitted
from djinn_weights.hub import HubSource, parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache_model(cache: Path, name: str, files: dict[str, bytes], branch: str = "main") -> None:
    """Add a model to a cache."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / branch).write_text(COMMIT)
    for number, (path, data) in enumerate(files.items()):
        (repository / "blobs" / str(number)).write_bytes(data)
        (snapshot / path).parent.mkdir(exist_ok=True)
        (snapshot / path).symlink_to(repository / "blobs" / str(number))


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_weights.hub


class TestHub(WeightSourceConformance):
    @pytest.fixture
    def source(self, tmp_path):
        return HubSource(tmp_path / "nowhere")

    @pytest.fixture
    def place(self, tmp_path):
        def place(data):
            cache_model(tmp_path / "cache", "org/model", {"model.safetensors": data})
            return "hf://org/model", WeightPermissions((tmp_path / "cache",))

        return place


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("hf://org/model", ("org/model", "main", "")),
        ("hf://org/model@v1", ("org/model", "v1", "")),
        ("hf://org/model@v1/unet/model.safetensors", ("org/model", "v1", "unet/model.safetensors")),
        ("hf://org/model/model.safetensors", ("org/model", "main", "model.safetensors")),
        ("hf://gpt2@main", ("gpt2", "main", "")),
    ],
)
def test_hub_addresses_are_parsed(address, expected):
    assert parse(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "hf:org/model",
        "hf://",
        "hf://a/b/c@v1",
        "hf://a/b@",
        "hf://../b@v1",
        "hf://a--b/c@v1",
        "hf://./b",
        "hf://a/b@..",
        "hf://a/b@./c",
    ],
)
def test_invalid_hub_addresses_are_refused(address):
    with pytest.raises(WeightsUnavailable):
        parse(address)


def test_cached_branches_and_commits_open_and_others_are_refused(tmp_path):
    cache_model(tmp_path, "org/model", {"a.safetensors": b"1", "sub/b.safetensors": b"22"}, branch="v1")
    source, permissions = HubSource(tmp_path / "nowhere"), WeightPermissions((tmp_path,))
    for revision in ("v1", COMMIT):
        assert [file.name for file in open_permitted(source, f"hf://org/model@{revision}", permissions)] == [
            "a.safetensors"
        ]
        (file,) = open_permitted(source, f"hf://org/model@{revision}/sub", permissions)
        assert (file.name, file.size) == ("b.safetensors", 2)
    for address in (
        "hf://org/model",
        "hf://org/other@v1",
        "hf://org/model@v1/c.safetensors",
        f"hf://org/model@{COMMIT[:-1]}",
    ):
        with pytest.raises(WeightsUnavailable, match="there is no"):
            open_permitted(source, address, permissions)


def test_links_out_of_hub_cache_are_not_followed(tmp_path):
    (tmp_path / "secret.safetensors").write_bytes(b"1")
    cache_model(tmp_path / "cache", "org/model", {"a.safetensors": b"1"})
    snapshot = tmp_path / "cache" / "models--org--model" / "snapshots" / COMMIT
    (snapshot / "b.safetensors").symlink_to(tmp_path / "secret.safetensors")
    permissions = WeightPermissions((tmp_path / "cache",))
    with pytest.raises(WeightsUnavailable):
        open_permitted(HubSource(tmp_path), "hf://org/model@main/b.safetensors", permissions)
    with pytest.raises(WeightsUnavailable):
        open_permitted(HubSource(tmp_path), "hf://org/model", permissions)
    # The server may use its own cache only with permission.
    with pytest.raises(WeightsUnavailable):
        open_permitted(HubSource(tmp_path / "cache"), "hf://org/model@main/a.safetensors", WeightPermissions())
