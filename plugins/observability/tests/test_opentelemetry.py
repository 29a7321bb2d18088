"""Traces and metrics of a program and a server in processes of their own, as they reach a collector."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from servers import Server, start_server, wait_for

import djinn_observability.opentelemetry
from djinn.errors import ConfigurationError
from djinn.hooks import Event, Observer
from djinn.testing import ObserverConformance, PluginConformance

pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry's exporter is not installed")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from djinn_observability.opentelemetry.client_observer import ClientObserver
from djinn_observability.opentelemetry.server_observer import ServerObserver
from djinn_observability.opentelemetry.telemetry import Telemetry

PROGRAM = """
import torch, djinn
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider(resource=Resource.create({"service.name": "training"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)

with trace.get_tracer("mine").start_as_current_span("step"):
    weights = torch.ones(256, 256).to("remote_accelerator:0")
    print((weights @ weights).sum().item())
    try:
        weights[torch.tensor([999]).to(weights.device)].cpu()
    except IndexError:
        print("failed")
djinn.shut_down()
provider.shutdown()
"""


class Collector:
    """A fake OpenTelemetry collector that receives OTLP protobuf messages over HTTP."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[str, object]] = {}  # by hexadecimal id: service, span
        self.metrics: dict[str, set[str]] = {}  # by service: names
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.store(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def store(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in part.scope_spans:
                    self.spans.update({span.span_id.hex(): (_service(part), span) for span in scope.spans})
        elif path == "/v1/metrics":
            for part in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                names = {metric.name for scope in part.scope_metrics for metric in scope.metrics}
                self.metrics.setdefault(_service(part), set()).update(names)

    def spans_named(self, name: str) -> list[object]:
        return [span for _, span in list(self.spans.values()) if span.name == name]


def _service(part) -> str:
    return next(a.value.string_value for a in part.resource.attributes if a.key == "service.name")


def attributes_of(span) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


@pytest.fixture(scope="module")
def traced_server(python, plain_environment, tmp_path_factory, collector) -> Iterator[Server]:
    """Yield a server that exports to the collector, after a traced program has used it."""
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    environment = plain_environment | variables
    folder = tmp_path_factory.mktemp("told")
    server = start_server(python.start, folder, "--threads", "1", "--store-gib", "0", env=environment)
    client = environment | {"DJINN_CONNECTION_FILE": str(server.file)}
    ran = python.run("-c", PROGRAM, env=client, capture_output=True, text=True)
    assert ran.stdout.split() == [str(256.0**3), "failed"], ran.stderr
    yield server
    assert server.stop() == 0, server.log.read_text()


def test_executor_spans_are_children_of_program_span(traced_server, collector):
    wait_for(
        lambda: len(collector.spans_named("djinn.execute")) >= len(collector.spans_named("djinn.submit")) > 0,
        "the spans",
    )
    (step,) = collector.spans_named("step")
    services = {span_id: service for span_id, (service, _) in collector.spans.items()}
    submitted = {span.span_id: span for span in collector.spans_named("djinn.submit")}
    executed = collector.spans_named("djinn.execute")
    for span in submitted.values():
        assert span.parent_span_id == step.span_id
        assert attributes_of(span)["server.address"]
    assert {span.parent_span_id for span in executed} == set(submitted)
    for span in executed:
        parent = submitted[span.parent_span_id]
        assert span.trace_id == step.trace_id
        assert services[span.span_id.hex()] == "djinn-executor"
        assert services[parent.span_id.hex()] == "training"
        assert attributes_of(span)["djinn.submission"] == attributes_of(parent)["djinn.submission"]
        assert parent.start_time_unix_nano <= span.end_time_unix_nano
    failed = [span for span in executed if span.status.code == span.status.STATUS_CODE_ERROR]
    assert len(failed) == 1
    assert attributes_of(failed[0])["error.type"] == "RemoteError"
    assert submitted[failed[0].parent_span_id].status.code == failed[0].status.STATUS_CODE_ERROR


def test_uploads_share_one_span(traced_server, collector):
    (step,) = collector.spans_named("step")
    first, second = sorted(collector.spans_named("djinn.upload"), key=lambda span: span.start_time_unix_nano)
    assert [attributes_of(span)["djinn.upload.size"] for span in (first, second)] == [256 * 256 * 4, 8]
    assert {first.parent_span_id, second.parent_span_id} == {step.span_id}


def test_peer_transfer_is_span_of_program(python, plain_environment, collector):
    program = (
        PROGRAM.partition("with trace.")[0]
        + """
djinn.configure(executors=2)
with trace.get_tracer("mine").start_as_current_span("pooled"):
    print((torch.ones(64, 64).to("remote_accelerator:1") * 2).to("remote_accelerator:2").sum().item())
djinn.shut_down()
provider.shutdown()
"""
    )
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    ran = python.run("-c", program, env=plain_environment | variables, capture_output=True, text=True)
    assert ran.stdout.split() == ["8192.0"], ran.stderr
    wait_for(lambda: collector.spans_named("djinn.transfer"), "the transfer's span")
    (transfer,), (pooled,) = collector.spans_named("djinn.transfer"), collector.spans_named("pooled")
    assert transfer.parent_span_id == pooled.span_id
    assert attributes_of(transfer)["djinn.transfer.size"] == 64 * 64 * 4
    called = {
        attributes_of(s)["djinn.executor"]: attributes_of(s)["server.address"]
        for s in collector.spans_named("djinn.submit")
    }
    assert called.keys() >= {1, 2}
    assert called[1] != called[2]


def test_collector_receives_metrics_of_gateway_and_executor(traced_server, collector):
    wanted = {"djinn-executor": "rpc.server.call.duration", "djinn-gateway": "djinn.gateway.clients"}
    traced_server.stop()  # the gateway tells what it has counted at the latest now
    wait_for(lambda: all(m in collector.metrics.get(s, ()) for s, m in wanted.items()), f"of {collector.metrics}")


def test_opentelemetry_is_not_imported_without_configuration(python, plain_environment):
    program = """
import sys, torch, djinn
from djinn_client.runtime import client
torch.ones(3).to("remote_accelerator:0").sum().item()
print("opentelemetry" in [o.name for o in client.context.registry.observers], [n for n in sys.modules if n.startswith("opentelemetry")])
print(client.context.observers.trace_context("submission", 0, 1) == "")
"""
    ran = python.run("-c", program, env=plain_environment, capture_output=True, text=True)
    assert ran.stdout.split("\n")[:2] == ["False []", "True"], ran.stderr


def test_missing_sdk_error_names_package(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match="pip install opentelemetry-sdk"):
        djinn_observability.opentelemetry.djinn_register_observers()


# --- the observers by themselves ---------------------------------------------------------------------------------


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(memory) -> Telemetry:
    traces = TracerProvider()
    traces.add_span_processor(SimpleSpanProcessor(memory))
    return Telemetry(traces.get_tracer("djinn"), MeterProvider([InMemoryMetricReader()]).get_meter("djinn"))


def test_session_end_closes_open_spans(telemetry, memory):
    observer = ClientObserver(lambda _: telemetry)
    assert observer.trace_context("submission", 0, 1)[:3] == "00-"
    observer.observe(Event("disconnected", 0.0, "client"))
    (span,) = memory.get_finished_spans()
    assert span.attributes["error.type"] == "SessionLost"


def test_break_restart_and_transfer_make_spans(telemetry, memory):
    observer, server = ClientObserver(lambda _: telemetry), ServerObserver(lambda _: telemetry)
    observer.observe(Event("connected", 0.0, "client", {"server": "tcp://gpu:5556"}))
    observer.observe(Event("reconnected", 0.0, "client", {"server": "tcp://gpu:5556", "duration": 2.0}))
    with telemetry.tracer.start_as_current_span("step"):
        trace = observer.trace_context("transfer", 1, 7)
    moved = {"transfer": 7, "source": 1, "bytes": 4096, "duration": 0.5, "error": "", "trace": trace}
    server.observe(Event("transferred", 100.0, "executor", moved))
    server.observe(Event("executor_died", 100.0, "gateway", {"device": "cpu:0", "process": 8}))
    server.observe(Event("executor_restarted", 103.0, "gateway", {"device": "cpu:0", "process": 9}))
    spans = {span.name: span for span in memory.get_finished_spans()}
    assert spans["djinn.reconnect"].attributes["server.port"] == 5556
    for name, seconds in {"djinn.reconnect": 2.0, "djinn.transfer": 0.5, "djinn.executor.restart": 3.0}.items():
        assert abs((spans[name].end_time - spans[name].start_time) / 1e9 - seconds) < 1e-3
    assert spans["djinn.transfer"].parent.span_id == spans["step"].context.span_id


class TestTheClientObserver(ObserverConformance):
    @pytest.fixture
    def observer(self, telemetry) -> Observer:
        return ClientObserver(lambda _: telemetry)


class TestTheServerObserver(ObserverConformance):
    @pytest.fixture
    def observer(self, telemetry):
        return ServerObserver(lambda _: telemetry)


class TestThePlugin(PluginConformance):
    @pytest.fixture
    def plugin(self, monkeypatch, telemetry):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")  # nothing is sent there
        monkeypatch.setattr("djinn_observability.opentelemetry.telemetry.collector_telemetry", lambda _: telemetry)
        return djinn_observability.opentelemetry
