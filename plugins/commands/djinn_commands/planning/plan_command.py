"""Command `djinn plan`: whether a model fits on the servers now, or its placement and speed on a described cluster."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

if TYPE_CHECKING:
    from djinn.planning import NetworkTopology, PipelineResult
    from djinn_commands.planning.forecast import Forecast
    from djinn_commands.planning.model import Step

_GB = 1e9


@click.command("plan")
@click.option(
    "--cluster",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file that describes the devices and links of a cluster, which need not exist. Replaces the servers.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    help="Name (`djinn login`) or URL of a server. May be repeated. Default: the configured servers.",
)
@click.option("--connection-file", type=click.Path(path_type=Path), help="File that `djinn serve` wrote.")
@click.option(
    "--step",
    type=click.Choice(("forward", "decode", "train")),
    default="forward",
    help="Work of the model: a call, one decoded token, or a training step.",
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Batch size of the inputs.")
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Tokens of each input. For --step decode: tokens of the prompt.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="For --step decode: number of tokens decoded after the prompt.",
)
@click.option("--optimizer", default="adamw", show_default=True, help="For --step train: a class of torch.optim.")
@click.option("--dtype", default="", help="Dtype of the weights, such as bfloat16. Default: the model's own.")
@click.option("--policy", default="", help="The placement policy. Default: the preferred policy for several devices.")
@click.option("--scheduler", default="", help="The scheduler. Default: the preferred scheduler for several devices.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.argument("model")
def plan(
    file: Path | None,
    servers: tuple[str, ...],
    connection_file: Path | None,
    model: str,
    policy: str,
    scheduler: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Report whether MODEL fits on the servers now, which changes would make it fit, and its predicted speed.

    With --cluster, report how MODEL would run on the described cluster: placement, memory, latency, throughput and bottleneck.

    MODEL is one of

    \b
    config.json      the configuration of a Hugging Face model, or its folder
    module:function  a function that returns a model, or a model and its inputs

    The command needs no weights and computes nothing. Cost models predict the times. `djinn calibrate` measures devices for them.
    The exit status is 1 if MODEL does not fit on the servers.
    """  # noqa: D301 - click looks for the character, not for its spelling
    from djinn_commands.planning.model import captured_model, step_of

    step: Step = step_of(**options)
    if file is None:
        from djinn_commands.planning.fit import print_fit

        print_fit(model, step, servers, connection_file, (policy, scheduler), as_json=as_json)
        return
    if servers or connection_file is not None:
        raise click.UsageError(
            "--cluster plans for a described cluster and not for servers: remove --cluster, or --server and --connection-file"
        )
    from djinn.planning import read_cluster

    topology = read_cluster(file.read_text(encoding="utf-8"), str(file))
    with contextlib.redirect_stdout(sys.stderr):
        program = captured_model(model, step, "annotate")
    result, prediction = _plan_and_forecast(program, topology, policy, scheduler)
    if as_json:
        click.echo(json.dumps(_as_dict(result, prediction, step), indent=2))
    else:
        for line in _lines(result, prediction, step, file):
            click.echo(line)


def _plan_and_forecast(
    captured: PipelineResult, topology: NetworkTopology, policy: str, scheduler: str
) -> tuple[PipelineResult, Forecast]:
    """Return the plan of a run with weights and caches on their devices, and its forecast.

    Raises:
        ConfigurationError: the policy or scheduler does not exist.
        InvalidStage: the cluster cannot run the model. The message has the figures.
    """
    from djinn_client.interception.recording.substitute import rewrite
    from djinn_commands.planning.forecast import forecast
    from djinn_core.planning.stages.placement_fit import bytes_held
    from djinn_profiler.plans.cluster_plan import plan_for_cluster

    graph: Any = captured.graph  # the capture came from a program
    plan = plan_for_cluster(
        graph, topology, policy=policy, scheduler=scheduler, profile=captured.profile, rewrite=rewrite
    )
    bytes_by_device = bytes_held(plan.result, plan.resident, plan.copies)
    prediction = forecast(plan.result, plan.timeline, plan.first_timeline, bytes_by_device)
    return attrs.evolve(plan.result, seconds=plan.first.seconds), prediction


def _as_dict(result: PipelineResult, forecast: Forecast, step: Step) -> dict[str, Any]:
    return {
        "step": step.kind,
        "batch": step.batch,
        "tokens": step.tokens,
        "nodes": len(result.graph.nodes),
        "devices_in_cluster": len(result.topology.devices),
        "policy": result.placement.policy if result.placement else "",
        "scheduler": result.schedule.scheduler if result.schedule else "",
        **attrs.asdict(forecast),
        "inputs_per_second": step.batch / forecast.interval if forecast.interval else None,
        "planning_seconds": dict(result.seconds),
    }


def _lines(result: PipelineResult, forecast: Forecast, step: Step, file: Path) -> list[str]:
    used_count, there = len(forecast.devices), len(result.topology.devices)
    input_count = f"{step.batch} input{'s' if step.batch > 1 else ''}"
    lines = [
        f"{step.kind} of {input_count}, {step.tokens} tokens each, on {used_count} of {there:,} devices of {file}",
        "",
    ]
    for device in forecast.devices:
        memory = (
            f"{device.inputs / _GB:,.1f} GB of inputs, peak {device.peak / _GB:,.1f} of {device.memory / _GB:,.1f} GB"
        )
        lines.append(f"{device.device}: {', '.join(device.modules) or 'no module'}")
        lines.append(f"    {device.nodes:,} ops, {_time(device.busy)}; {memory}; {device.reason}")
    each, unit = (
        (step.batch / forecast.interval if forecast.interval else 0.0),
        "tokens" if step.kind == "decode" else "inputs",
    )
    replicas = (
        f"; {forecast.replicas:,} copies on all devices: {forecast.replicas * each:,.1f}"
        if forecast.replicas > 1
        else ""
    )
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in forecast.shares.items() if share >= 0.005)
    upload = f"; the first run uploads {forecast.upload_bytes / _GB:,.1f} GB, {forecast.upload_seconds:,.1f} s more"
    return [
        *lines,
        "",
        f"latency     {_time(forecast.latency)}{upload if forecast.upload_bytes else ''}",
        f"throughput  {each:,.1f} {unit}/s ({_time(forecast.interval / step.batch)} each) if batches follow without a pause{replicas}",
        "times are predicted from speeds in the file, and from assumed speeds for devices without one",
        f"limited by  {forecast.limit}. Time of ops on all devices: {shares}; transfers between devices: {_time(forecast.transfers)}",
    ]


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.3g} ms"
