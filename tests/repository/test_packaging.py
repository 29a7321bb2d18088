"""Files of `packaging` for orchestrators: what they say of `djinn serve` is there, and the chart renders to what Kubernetes takes."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from djinn_server.cli.serve import command as serve

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
CHART = PACKAGING / "kubernetes" / "djinn"
TOKENS = '{"tokens": [], "quotas": {}}'
SERVING = [
    CHART / "templates" / "statefulset.yaml",
    PACKAGING / "kubernetes" / "kuberay.yaml",
    PACKAGING / "compose.yaml",
    PACKAGING / "Containerfile",
    PACKAGING / "djinn.service",
]
OTHERS = {"--cap-drop", "--gpus", "--read-only", "--security-opt", "--tmpfs"}  # of docker
SETTINGS = [[], ["replicas=2", "gpus=0", "tls.secretName=certificate"], ["serviceMonitor.enabled=true"]]


def own_flags(text):
    """Flags of `djinn serve` in a file: those in lists of arguments, and those behind the command."""
    listed = re.findall(r"^\s*(?:- |ExecStart=\S+ serve )?(--[a-z-]+)[= ]", text, re.MULTILINE)
    in_json = re.findall(r'"(--[a-z-]+)"', text)
    behind = [flag for line in re.findall(r"djinn serve (.+)", text) for flag in re.findall(r"--[a-z-]+", line)]
    return {*listed, *in_json, *behind} - OTHERS


@pytest.mark.parametrize("path", SERVING, ids=lambda path: path.name)
def test_packaged_flags_exist(path):
    found = own_flags(path.read_text())
    known = {flag for parameter in serve.params for flag in parameter.opts}
    assert len(found) >= 5
    assert found <= known


@pytest.mark.parametrize("path", sorted((PACKAGING / "slurm").iterdir()), ids=lambda path: path.name)
def test_scripts_are_plain_shell(path):
    assert subprocess.run(["sh", "-n", path], check=False).returncode == 0
    serving = re.search(r'"[^"]*djinn[^"]*" serve (?:.*\\\n)*.*', path.read_text())[0]
    known = {flag for parameter in serve.params for flag in parameter.opts}
    assert set(re.findall(r"(--[a-z-]+)", serving)) <= known


def test_compose_mounts_what_the_server_reads():
    services = yaml.safe_load((PACKAGING / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert any(one.endswith(":/secrets/tokens.json:ro") for one in service["volumes"])
        assert "--token-file=/secrets/tokens.json" in service["command"]
        assert service["build"]["dockerfile"] == "packaging/Containerfile"


def render(tmp_path, *settings, tokens=TOKENS):
    (tmp_path / "tokens.json").write_text(tokens)
    command = ["helm", "template", "djinn", CHART, "--set-file", f"tokens.file={tmp_path / 'tokens.json'}"]
    return subprocess.run(
        [*command, *(f"--set={one}" for one in settings)], capture_output=True, text=True, check=False
    )


needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


@needs_helm
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_chart_renders(tmp_path, settings):
    more = ["serviceMonitor.token.secretName=watch"] if "serviceMonitor.enabled=true" in settings else []
    rendered = render(tmp_path, "image.repository=registry.example/djinn", *settings, *more)
    assert rendered.returncode == 0, rendered.stderr
    documents = [one for one in yaml.safe_load_all(rendered.stdout) if one]
    container = next(d for d in documents if d["kind"] == "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    gpus = 0 if "gpus=0" in settings else 1
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    assert ("--tls-self-signed" in container["args"]) == ("tls.secretName=certificate" not in settings)
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(Path(one.partition("=")[2]).parent) for one in container["args"] if "=/secrets/" in one} <= mounted
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("rendered; schemas of Kubernetes need kubernetes-validate")
    import kubernetes_validate

    for document in documents:
        if document["apiVersion"].partition("/")[0] != "monitoring.coreos.com":
            kubernetes_validate.validate(document, "1.30", strict=True)


@needs_helm
@pytest.mark.parametrize(
    ("settings", "tokens", "why"),
    [
        ([], TOKENS, "image.repository is not set"),
        (["image.repository=r", "serviceMonitor.enabled=true"], TOKENS, "serviceMonitor.token.secretName is not set"),
        (["image.repository=r"], "", "there are no tokens"),
    ],
)
def test_chart_names_missing_values(tmp_path, settings, tokens, why):
    rendered = render(tmp_path, *settings, tokens=tokens)
    assert rendered.returncode
    assert why in rendered.stderr
