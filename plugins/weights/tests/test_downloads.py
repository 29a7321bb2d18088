"""Models that only the hub has. A local web server answers huggingface_hub like the hub."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from configured import configured
from huggingface_hub import constants, hf_hub_download
from safetensors.torch import save
from servers import start_server

import djinn
from djinn.errors import WeightsUnavailable
from djinn.hooks import WeightPermissions
from djinn.testing import open_permitted, open_session
from djinn_weights.hub import HubSource, downloads
from djinn_weights.hub.downloads import select_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER = "1123456789abcdef0123456789abcdef01234567"


class Hub:
    """A fake hub that serves models by name, as huggingface_hub expects."""

    def __init__(self):
        self.models, self.commits, self.asked, self.broken = {}, {}, [], set()
        self.half_sent = threading.Event()
        self.slow, self.go_on = "", threading.Event()  # a file whose second half is sent later
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def put(self, name, files, commit=COMMIT):
        self.models[name], self.commits[name] = files, commit

    def answer(self, request):
        path = request.path.partition("?")[0]
        self.asked.append((request.command, path))
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            revision = path.partition("/revision/")[2] or "main"
            if name not in self.models or revision not in {"main", "v1", self.commits[name]}:
                kind = "RepoNotFound" if name not in self.models else "RevisionNotFound"
                return self._send(request, 404, b"{}", {"X-Error-Code": kind})
            siblings = [
                {"rfilename": file, "size": len(data), "blobId": "0" * 40} for file, data in self.models[name].items()
            ]
            info = {"id": name, "modelId": name, "sha": self.commits[name], "siblings": siblings, "private": False}
            return self._send(request, 200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        name, _, rest = path.strip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        data = self.models.get(name, {}).get(file)
        if data is None or file in self.broken:
            return self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.commits[name]}
        return self._send(request, 200, data, headers, len(data) // 2 if file == self.slow else 0)

    def _send(self, request, status, data, headers, before=0):
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(data[:before])
            if before:
                request.wfile.flush()
                self.half_sent.set()
                assert self.go_on.wait(300)
            request.wfile.write(data[before:])


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(downloads, "_TIMEOUT_SECONDS", 5)
    made = Hub()
    yield made
    made.stop()


@pytest.fixture
def source(hub, tmp_path):
    return HubSource(tmp_path / "own", hub.endpoint)


SUFFIXES = (".safetensors", ".bin", ".gguf", ".index.json")
ALLOWED = WeightPermissions((), ("hf://org/*",), suffixes=SUFFIXES)
SHARDS = {
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode(),
    "1.safetensors": b"11",
    "2.safetensors": b"222",
    "consolidated.safetensors": b"11222",
    "pytorch_model.bin": b"1",
    "config.json": b"{}",
    "unet/x.safetensors": b"1",
}


def file_names(files):
    return [file.name for file in files]


def read(file):
    data = bytearray(file.size)
    file.read_into(0, memoryview(data))
    return bytes(data)


def downloaded_files(hub):
    return sorted({path.rpartition("/")[2] for command, path in hub.asked if command == "GET" and "/api/" not in path})


def test_download_fetches_only_weights_and_only_once(hub, source, tmp_path):
    hub.put("org/model", SHARDS)
    found = open_permitted(source, "hf://org/model@main", ALLOWED)
    assert file_names(found) == ["1.safetensors", "2.safetensors", "model.safetensors.index.json"]
    assert [read(file) for file in found[:2]] == [b"11", b"222"]
    assert downloaded_files(hub) == ["1.safetensors", "2.safetensors", "model.safetensors.index.json"]
    hub.asked.clear()
    assert file_names(open_permitted(source, "hf://org/model", ALLOWED)) == file_names(found)
    assert downloaded_files(hub) == []
    # a cache like any other
    cached = WeightPermissions((tmp_path / "own",), suffixes=SUFFIXES)
    assert file_names(open_permitted(HubSource(tmp_path / "nowhere"), "hf://org/model@main", cached)) == file_names(
        found
    )
    assert file_names(
        open_permitted(HubSource(tmp_path / "nowhere"), f"hf://org/model@{COMMIT}", cached)
    ) == file_names(found)


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_cache_files_have_the_modes_of_huggingface_hub(hub, source, tmp_path):
    hub.put("org/model", {"model.safetensors": b"1"})
    open_permitted(source, "hf://org/model@main", ALLOWED)
    hf_hub_download("org/model", "model.safetensors", cache_dir=tmp_path / "theirs", endpoint=hub.endpoint)
    ours, theirs = modes(tmp_path / "own" / "models--org--model"), modes(tmp_path / "theirs" / "models--org--model")
    assert "refs/main" in ours
    assert ours == theirs


def modes(folder):
    return {str(path.relative_to(folder)): oct(path.stat().st_mode) for path in folder.rglob("*")}


def test_current_reference_is_not_rewritten(hub, source, tmp_path):
    hub.put("org/model", {"model.safetensors": b"1"})
    open_permitted(source, "hf://org/model@main", ALLOWED)
    reference = tmp_path / "own" / "models--org--model" / "refs" / "main"
    before = reference.stat().st_ino
    open_permitted(source, "hf://org/model@main", ALLOWED)
    assert reference.stat().st_ino == before
    hub.put("org/model", {"model.safetensors": b"2"}, LATER)
    open_permitted(source, "hf://org/model@v1", ALLOWED)
    assert [path.name for path in sorted(reference.parent.iterdir())] == ["main", "v1"]


def test_hub_address_names_file_folder_or_tag(hub, source):
    hub.put("org/model", SHARDS | {"unet/config.json": b"{}", "a.gguf": b"1", "b.gguf": b"2"})
    assert file_names(open_permitted(source, "hf://org/model@v1/unet", ALLOWED)) == ["x.safetensors"]
    assert file_names(open_permitted(source, "hf://org/model/b.gguf", ALLOWED)) == ["b.gguf"]
    assert "a.gguf" not in downloaded_files(hub)
    for path in ("none", "config.json", "none.safetensors"):
        with pytest.raises(WeightsUnavailable):
            open_permitted(source, f"hf://org/model@main/{path}", ALLOWED)


def test_hub_is_not_contacted_without_permission(hub, source):
    hub.put("org/model", SHARDS)
    hub.put("other/model", SHARDS)
    for address, permissions in (
        ("hf://org/model", WeightPermissions()),
        ("hf://other/model", ALLOWED),
        ("hf://org", ALLOWED),
        ("hf://other/org/model", ALLOWED),
    ):
        with pytest.raises(WeightsUnavailable):
            open_permitted(source, address, permissions)
    assert not hub.asked


def test_moved_branch_is_downloaded_and_cache_serves_without_hub(hub, source):
    hub.put("org/model", {"model.safetensors": b"1"})
    assert read(open_permitted(source, "hf://org/model", ALLOWED)[0]) == b"1"
    hub.put("org/model", {"model.safetensors": b"2"}, LATER)
    assert read(open_permitted(source, "hf://org/model", ALLOWED)[0]) == b"2"
    hub.models.clear()
    assert read(open_permitted(source, "hf://org/model", ALLOWED)[0]) == b"2"
    assert read(open_permitted(source, f"hf://org/model@{COMMIT}", ALLOWED)[0]) == b"1"
    with pytest.raises(
        WeightsUnavailable, match=r"cannot download 'org/other' from the hub \(RepositoryNotFoundError\)"
    ):
        open_permitted(source, "hf://org/other", ALLOWED)


def test_interrupted_download_resumes(hub, source, tmp_path):
    hub.put("org/model", SHARDS)
    hub.broken.add("2.safetensors")
    for address in ("hf://org/model", f"hf://org/model@{COMMIT}"):
        with pytest.raises(WeightsUnavailable, match="cannot download"):
            open_permitted(source, address, ALLOWED)
    both = WeightPermissions((tmp_path / "own",), ALLOWED.addresses, suffixes=SUFFIXES)
    hub.broken.clear()
    for address in (f"hf://org/model@{COMMIT}", "hf://org/model"):
        assert len(open_permitted(source, address, both)) == 3


def test_full_disk_fails_the_download(hub, source, monkeypatch, tmp_path):
    hub.put("org/model", SHARDS)
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(downloads, "RESERVE", shutil.disk_usage(tmp_path).total)
    with pytest.raises(WeightsUnavailable, match="free bytes, which"):
        open_permitted(source, "hf://org/model", ALLOWED)
    assert downloaded_files(hub) == ["model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("files", "path", "expected"),
    [
        (SHARDS, "", ("", "model.safetensors.index.json", [])),
        (["model.safetensors", "model.safetensors.index.json"], "", ("", "", ["model.safetensors"])),
        (["pytorch_model.bin", "training_args.bin"], "", ("", "", ["pytorch_model.bin"])),
        (["a/model.bin"], "a/", ("a/", "", ["a/model.bin"])),
        (["a/x.bin.index.json"], "a/x.bin.index.json", ("a/", "a/x.bin.index.json", ["a/x.bin.index.json"])),
        (["a.bin", "b.bin"], "", None),
        (["a.gguf"], "", None),
        ([], "", None),
    ],
)
def test_download_selects_weight_files(files, path, expected):
    if expected is None:
        with pytest.raises(WeightsUnavailable):
            select_files(files, path, SUFFIXES)
    else:
        assert select_files(files, path, SUFFIXES) == expected


def open_slowly(hub, other):
    """A download blocks neither the session nor other threads. It continues if one client stops waiting."""
    hub.slow = "slow.safetensors"
    expected = torch.randn(6 << 20)  # half of the file is more than huggingface_hub reads at a time
    hub.put("org/slow", {"slow.safetensors": save({"c": expected})})
    found, kept, router = [], [], open_session().router
    ask = router.ask
    router.ask = lambda message, *rest: kept.append(getattr(message, "patience", 0.0)) or ask(message, *rest)
    with (
        djinn.deadline(1.0),
        pytest.raises(djinn.errors.DeadlineExceeded, match="The server continues to download for a while"),
    ):
        djinn.open_weights("hf://org/slow")
    thread = threading.Thread(target=lambda: found.append(djinn.open_weights("hf://org/slow")))
    thread.start()
    assert hub.half_sent.wait(300)
    assert (other * 2).sum().item() == 42
    assert djinn.open_weights("hf://org/model")["b"].sum().item() == 21
    assert not found
    hub.go_on.set()
    thread.join(300)
    assert torch.equal(found[0]["c"].cpu(), expected)
    assert len(kept) > 3
    assert sum(kept) < 0.5, "the executor keeps no question, for which all other threads would wait"


def test_download_is_cancelled_without_waiting_clients(hub, source):
    hub.put("org/model", {"model.safetensors": bytes(100)})
    told = []

    def report(done, expected):
        told.append((done, expected))
        raise WeightsUnavailable("no client waits")

    with pytest.raises(WeightsUnavailable, match="no client waits"):
        open_permitted(source, "hf://org/model", ALLOWED, report)
    assert told[0][1] == 100


# In a forked process, huggingface_hub has already read the environment, so read it again.
READ_AGAIN = """
import importlib, djinn_weights.hub
from huggingface_hub import constants, hf_hub_download
importlib.reload(constants)
djinn_weights.hub.HF_HUB_CACHE = constants.HF_HUB_CACHE
"""


def test_executor_downloads_model(hub, python, plain_environment, tmp_path):
    tensors = {"a": torch.randn(50, 60), "b": torch.arange(7)}
    hub.put("org/model", {"model.safetensors": save(tensors), "config.json": b"{}"})
    environment = plain_environment | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")])),
    }
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(READ_AGAIN)
    server = start_server(python.start, tmp_path, "--threads", "1", "--allow-weights", "hf://org/*", env=environment)
    try:
        with configured(connection_file=server.file):
            weights = djinn.open_weights("hf://org/model")
            for name, tensor in tensors.items():
                assert torch.equal(weights[name].cpu(), tensor)
            with pytest.raises(djinn.errors.WeightsUnavailable, match="there is no"):
                djinn.open_weights("hf://other/model")
            open_slowly(hub, weights["b"])
    finally:
        hub.go_on.set()
        server.stop()
    assert downloaded_files(hub) == ["model.safetensors", "slow.safetensors"]
    assert (tmp_path / "cache" / "models--org--model" / "refs" / "main").read_text() == COMMIT
