"""Alert rules and the Grafana dashboard of `packaging/monitoring`; that their metrics exist is tested in `test_metrics.py`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "packaging" / "monitoring"
RULES = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)")

SERVER = {"instance": "gpu:5558", "job": "djinn"}
EXECUTOR = SERVER | {"executor": "0", "device": "cuda:0", "tenant": "alice"}
# Samples, one a minute, under which each alert fires after half an hour: `start+step x number`.
FIRES = {
    "DjinnServerDown": {"up": (SERVER, "0x40")},
    "DjinnNotReady": {"djinn_gateway_ready": (SERVER, "0x40"), "djinn_gateway_draining": (SERVER, "0x40")},
    "DjinnExecutorDown": {"djinn_executor_up": (EXECUTOR, "0x40")},
    "DjinnExecutorRestarts": {"djinn_executor_restarts_total": (EXECUTOR, "0+1x40")},
    "DjinnRecoveryFailures": {"djinn_executor_recovery_failures_total": (EXECUTOR, "0+1x40")},
    "DjinnQueueLong": {
        'djinn_executor_queue_duration_seconds_bucket{le="1"}': (EXECUTOR, "0+1x40"),
        'djinn_executor_queue_duration_seconds_bucket{le="10"}': (EXECUTOR, "0+10x40"),
        'djinn_executor_queue_duration_seconds_bucket{le="+Inf"}': (EXECUTOR, "0+10x40"),
    },
    "DjinnDeviceMemoryFull": {
        "djinn_executor_device_memory_free_bytes": (EXECUTOR, "1x40"),
        "djinn_executor_device_memory_bytes": (EXECUTOR, "100x40"),
    },
    "DjinnMemoryPressure": {"djinn_executor_memory_pressure_level": (EXECUTOR, "2x40")},
    "DjinnOutOfMemory": {'djinn_executor_op_failures_total{cause="memory"}': (EXECUTOR, "0+1x40")},
    "DjinnSessionErrors": {'djinn_executor_sessions_closed_total{reason="error"}': (EXECUTOR, "0+1x40")},
    "DjinnQuotaReached": {"djinn_executor_quota_refusals_total": (EXECUTOR, "0+1x40")},
    "DjinnWrongTokens": {'djinn_gateway_refusals_total{reason="token"}': (SERVER, "0+60x40")},
    "DjinnUnauthenticatedFlood": {"djinn_gateway_unauthenticated_dropped_total": (SERVER, "0+1x40")},
    "DjinnFileDescriptors": {"process_open_fds": (SERVER, "900x40"), "process_max_fds": (SERVER, "1000x40")},
}
# Of a server that is well: nothing fires.
WELL = {
    "up": (SERVER, "1x40"),
    "djinn_gateway_ready": (SERVER, "1x40"),
    "djinn_gateway_draining": (SERVER, "0x40"),
    "djinn_executor_up": (EXECUTOR, "1x40"),
    "djinn_executor_restarts_total": (EXECUTOR, "1x40"),
    "djinn_executor_device_memory_free_bytes": (EXECUTOR, "50x40"),
    "djinn_executor_device_memory_bytes": (EXECUTOR, "100x40"),
    "djinn_executor_memory_pressure_level": (EXECUTOR, "1x40"),
    'djinn_executor_op_failures_total{cause="memory"}': (EXECUTOR, "3x40"),
}


def series(samples: dict[str, tuple[dict[str, str], str]]) -> list[dict[str, str]]:
    found = []
    for name, (labels, values) in samples.items():
        family, _, own = name.rstrip("}").partition("{")
        shown = ", ".join([*(f'{label}="{value}"' for label, value in labels.items()), *filter(None, [own])])
        found.append({"series": f"{family}{{{shown}}}", "values": values})
    return found


def test_each_alert_has_runbook_section():
    headings = re.findall(r"^#+ (\w+)$", (ROOT / "docs" / "servers.md").read_text(), re.MULTILINE)
    linked = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in RULES}
    assert linked == {name: f"docs/servers.md#{name.lower()}" for name in FIRES}
    assert [name for name in headings if name.startswith("Djinn")] == list(linked)


@needs_promtool
def test_alerts_fire_only_for_their_faults(tmp_path):
    cases = {name: (samples, [name]) for name, samples in FIRES.items()} | {"well": (WELL, [])}
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    tests = []
    for name, (samples, alerts) in cases.items():
        expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts]
        asked = {"expr": query, "eval_time": "30m", "exp_samples": expected}
        tests.append({"name": name, "interval": "1m", "input_series": series(samples), "promql_expr_test": [asked]})
    file = tmp_path / "tests.json"  # which is YAML
    file.write_text(json.dumps({"rule_files": [str(MONITORING / "alerts.yml")], "tests": tests}))
    ran = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@needs_promtool
def test_dashboard_queries_are_valid(tmp_path):
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 20
    rules = [{"record": f"query:{i}", "expr": q.replace("$__rate_interval", "5m")} for i, q in enumerate(queries)]
    file = tmp_path / "queries.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    ran = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_dashboard_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
