"""Every metric that a server reports is declared, with its description, and nothing else is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import attrs

import djinn_server
from djinn_observability.dashboard import metrics
from djinn_server.session_metrics import EVERY_SESSION, SessionCounters

SERVER = Path(djinn_server.__file__).parent
COUNTED = re.compile(r'usage\.count(?:_as)?(?:\(|, )"([a-z_]+)"')


def keys(file, functions=()):
    """Names in the dictionaries of a file that collects metrics; of these functions, if there are any."""
    tree = ast.parse((SERVER / file).read_text())
    inside = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in functions] if functions else [tree]
    found = [node for part in inside for node in ast.walk(part) if isinstance(node, ast.Dict)]
    return {key.value for one in found for key in one.keys if isinstance(key, ast.Constant)}


def test_each_reported_metric_is_declared_once():
    counted = {name for path in SERVER.rglob("*.py") for name in COUNTED.findall(path.read_text())}
    counted |= {field.name for field in attrs.fields(SessionCounters)} | {*EVERY_SESSION}
    of_executor = [one.name for one in (*metrics.COUNTERS, *metrics.GAUGES, *metrics.DISTRIBUTIONS)]
    of_gateway = [one.name for one in (*metrics.GATEWAY_COUNTERS, *metrics.GATEWAY_GAUGES)]
    assert len(set(of_executor)) == len(of_executor)
    assert counted - set(of_executor) == set()
    assert keys("executor_metrics.py") - set(of_executor) - {"limit_bytes"} == set()
    of_operations = keys("gateway/operations.py", ("_gateway_metrics", "_executor_metrics"))
    assert of_operations - set(of_executor) - set(of_gateway) == set()
    assert set(of_gateway) <= of_operations
