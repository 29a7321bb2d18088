"""`djinn plan` for servers: whether a model fits on them now, and which changes would make it fit."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from djinn import DjinnError
from djinn.errors import ConfigurationError, DoesNotFit
from djinn.planning import DeviceCapabilities, NetworkTopology
from djinn_client.interception.recording.substitute import rewrite
from djinn_client.runtime.connecting.servers import ask_named
from djinn_client.runtime.planning.run_pipeline import capabilities_of
from djinn_client.runtime.plugins import open_plugins
from djinn_commands.planning.model import BuiltModel, Step, built_model
from djinn_commands.planning.peak import Peak, peak_of
from djinn_core.planning.pipeline import plan as run_stages
from djinn_core.planning.request import Request, preferred
from djinn_core.planning.stages.placement_fit import bytes_held
from djinn_core.planning.stages.simulate import simulated
from djinn_core.registry.registry import Registry
from djinn_core.system.printable import size_text as binary_size
from djinn_core.wire.messages import Status

if TYPE_CHECKING:
    from djinn_profiler.captured import Captured

# Additional bytes for uncounted memory: scalars, states of random generators, and workspace of ops.
ALLOWANCE: Final = 1.02
SMALL: Final = 128 << 10
BUDGET: Final = 0.75  # share of a memory limit that tensors may use (docs/memory.md)
PASSES: Final = 2  # number of captured steps: later steps start with values that the first one keeps
_SEVERAL: Final = (2, 4, 8)
_TRIES: Final = 4


@attrs.frozen
class Program:
    """A program of the step, planned for one device.

    Attributes:
        name: `forward`, `prompt`, `decode` or `train`.
        peak: peak memory of the program.
        seconds: predicted seconds of one step.
    """

    name: str
    peak: Peak
    seconds: float

    @property
    def needed(self) -> int:
        """Return the free bytes that the program needs: its peak and the allowance of `with_allowance`."""
        return with_allowance(self.peak.bytes)


@attrs.frozen
class Executor:
    """A device of a server, at the time of the query.

    Attributes:
        server: URL of the server.
        device: the device's capabilities and free memory.
    """

    server: str
    device: DeviceCapabilities

    def fits(self, needed: int) -> bool:
        """Return True if `needed` bytes are free, or if the free memory is unknown."""
        return self.device.memory_free is None or needed <= self.device.memory_free


@attrs.frozen
class Suggestion:
    """A change that reduces the memory that a step needs.

    Attributes:
        change: the command or the options that make the change.
        needed: free bytes that the step needs after the change.
        fits: True if these bytes are free.
        reason: consequence of the change, or why it does not help.
    """

    change: str
    needed: int
    fits: bool
    reason: str = ""


def with_allowance(counted: int) -> int:
    """Return `counted`, the peak bytes of a program's tensors, plus an allowance for bytes that are not counted."""
    return int(counted * ALLOWANCE) + SMALL


def print_fit(
    target: str,
    step: Step,
    servers: Sequence[str],
    connection_file: Path | None,
    policies: tuple[str, str],
    *,
    as_json: bool,
) -> None:
    """Print whether the model fits. Exit with status 1 if it does not.

    Args:
        target: the model: a configuration file, its folder, or `module:function`.
        step: the work of the model.
        servers: names or URLs of servers. If empty, the configured servers are asked.
        connection_file: a file that `djinn serve` wrote, or None.
        policies: names of placement policy and scheduler. An empty name stands for the preferred one.
        as_json: True to print one JSON object.

    Raises:
        ConfigurationError: no server is configured, the model cannot be built, or the policy or scheduler does not exist.
        DjinnError: no server answers.
    """
    executors = executors_of(servers, connection_file)
    with contextlib.redirect_stdout(sys.stderr):
        fit = Fit(built_model(target, step), step, executors, open_plugins(), *policies)
        description = fit.described()
    if as_json:
        click.echo(json.dumps(description, indent=2))
    else:
        click.echo("\n".join(fit.lines(description)))
    if not description["fits"]:
        raise SystemExit(1)


def executors_of(servers: Sequence[str], connection_file: Path | None) -> tuple[Executor, ...]:
    """Return the devices of the servers. If some servers do not answer, name them on stderr.

    Raises:
        ConfigurationError: no server is named or configured.
        DjinnError: no server answers.
    """
    replies = ask_named(servers, connection_file)
    executors: dict[tuple[str, str], Executor] = {}
    for number, (url, reply) in enumerate(replies.items()):
        if isinstance(reply, Status):
            for executor in reply.executors:  # tenants have separate executors on one device
                key = url, executor.device.id
                device = attrs.evolve(capabilities_of(executor.device), id=f"{number}/{executor.device.id}")
                earlier = executors.get(key)
                free = [d.memory_free for d in (device, earlier and earlier.device) if d and d.memory_free is not None]
                executors[key] = Executor(url, attrs.evolve(device, memory_free=min(free, default=None)))
    silent = {url: reply for url, reply in replies.items() if isinstance(reply, DjinnError)}
    if not executors:
        raise next(iter(silent.values()), _no_executor())
    for url, error in silent.items():
        click.echo(f"djinn plan ignores {url}, which did not answer: {error}", err=True)
    return tuple(executors.values())


def _no_executor() -> DjinnError:
    return ConfigurationError(
        "no server has an executor: see `djinn status`, and repeat the command when one has started"
    )


@attrs.define
class Fit:
    """Computes whether a step of a model fits on executors.

    Attributes:
        model: the model.
        step: its work.
        executors: the candidate devices.
        registry: the plugins that plan.
        policy: placement policy for several devices. If empty, the preferred policy is used.
        scheduler: scheduler for several devices. If empty, the preferred scheduler is used.
    """

    model: BuiltModel
    step: Step
    executors: tuple[Executor, ...]
    registry: Registry
    policy: str = ""
    scheduler: str = ""

    def programs(self, step: Step) -> tuple[Program, ...]:
        """Return the programs of `step`, each planned for the device with the most free memory."""
        return tuple(self._program(name, one, step) for name, one in self.model.captured(step, passes=PASSES).items())

    def _program(self, name: str, captured: Captured, step: Step) -> Program:
        device = attrs.evolve(self._executor_with_most_free_memory.device, memory=0, memory_free=None)
        resident = dict.fromkeys(captured.graph.inputs, device.id)
        result = run_stages(
            captured.graph, self.registry, Request(NetworkTopology((device,)), resident=resident, rewrite=rewrite)
        )
        runs = 1 if step.kind == "decode" else PASSES
        peak = peak_of(result, caches=step.kind == "decode")
        return Program(name, peak, simulated(result, resident=resident).seconds / runs)

    @property
    def _executor_with_most_free_memory(self) -> Executor:
        return max(self.executors, key=lambda one: math.inf if (free := one.device.memory_free) is None else free)

    def described(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        programs = self.programs(self.step)
        fullest = max(programs, key=lambda one: one.needed)
        alone = [one.fits(fullest.needed) for one in self.executors]
        together = {} if any(alone) or len(self.executors) == 1 else self._divided(self.step, self._devices())
        fits = any(alone) or bool(together)
        last = programs[-1]
        rate = (1 if self.step.kind == "train" else self.step.batch) / last.seconds if last.seconds else None
        context = self.step.batch * (self.step.tokens + self.step.new_tokens)
        cache = last.peak.left.get("cache", 0) if self.step.kind == "decode" else 0
        return {
            "model": self.model.name,
            "parameters": self.model.parameters,
            **attrs.asdict(self.step),
            "fits": fits,
            "needed": fullest.needed,
            "memory": {**fullest.peak.kinds, "allowance": fullest.needed - fullest.peak.bytes},
            "cache_bytes": cache,
            "cache_bytes_per_token": cache / context,
            "programs": [
                {"name": one.name, "needed": one.needed, "seconds": one.seconds, "most": dict(one.peak.most)}
                for one in programs
            ],
            "executors": [
                {
                    "server": one.server,
                    "device": one.device.id,
                    "name": one.device.name,
                    "memory": one.device.memory,
                    "free": one.device.memory_free,
                    "spill": one.device.spill,
                    "fits": good,
                }
                for one, good in zip(self.executors, alone, strict=True)
            ],
            "together": together,
            "suggestions": [] if fits else [attrs.asdict(one) for one in self._suggestions(fullest)],
            "rate": rate,
            "rate_unit": {"decode": "tokens", "train": "steps"}.get(self.step.kind, "inputs"),
            "measured_device": self._executor_with_most_free_memory.device.calibration is not None,
        }

    # --- several executors --------------------------------------------------------------------------------------

    def _devices(self) -> tuple[DeviceCapabilities, ...]:
        return tuple(one.device for one in self.executors)

    def _divided(self, step: Step, devices: Sequence[DeviceCapabilities]) -> dict[str, int]:
        """Divide the step between `devices`. Return the free bytes that each device needs, or an empty dict if it does not fit."""
        roomy = tuple(_less_allowance(device) for device in devices)
        request = Request(
            NetworkTopology(roomy),
            placement_policy=self.policy or preferred(self.registry.placement_policies, "single"),
            scheduler=self.scheduler or preferred(self.registry.schedulers, "sequential"),
            rewrite=rewrite,
        )
        bytes_by_device: dict[str, int] = {}
        for program in self.model.captured(step, passes=PASSES).values():
            try:
                result = run_stages(program.graph, self.registry, request)
            except DoesNotFit:
                return {}
            for device, nbytes in bytes_held(result, {}, {}).items():
                bytes_by_device[device] = max(bytes_by_device.get(device, 0), with_allowance(nbytes))
        return {device: nbytes for device, nbytes in bytes_by_device.items() if nbytes > SMALL}

    # --- changes that make it fit ---------------------------------------------------------------------------------

    def _suggestions(self, fullest: Program) -> Iterator[Suggestion]:
        """Yield changes that may make the model fit. Each was planned, so its bytes are known.

        `fullest`: the program that needs the most bytes.
        """
        step, free = self.step, self._executor_with_most_free_memory.device.memory_free or 0
        narrow = attrs.evolve(step, dtype="bfloat16")
        if self._itemsize > 2:
            yield self._suggest("--dtype bfloat16", narrow, "2 bytes per element of weights and activations")
        if step.kind == "train" and step.optimizer.lower() != "sgd":
            yield self._suggest("--optimizer sgd", attrs.evolve(step, optimizer="sgd"), "no optimizer state")
        if self.model.own_inputs is None:
            yield from self._smaller("batch", step, free)
            if step.kind == "decode" or "input_ids" in self._input_names:
                yield from self._smaller("tokens", step, free)
        yield self._spilling(fullest, free)
        yield from self._more_executors(fullest)
        if self._itemsize > 2 and step.batch > 1 and self.model.own_inputs is None:
            yield self._suggest("--dtype bfloat16 --batch 1", attrs.evolve(narrow, batch=1), "both changes")

    @property
    def _itemsize(self) -> int:
        sizes = [p.element_size() for p in self.model.model.parameters() if p.is_floating_point()]
        return 0 if self.step.dtype else max(sizes, default=0)

    @property
    def _input_names(self) -> str:
        return str(getattr(self.model.model, "main_input_name", ""))

    def _needed_bytes(self, step: Step) -> int:
        return max(one.needed for one in self.programs(step))

    def _suggest(self, change: str, step: Step, reason: str) -> Suggestion:
        bytes_needed = self._needed_bytes(step)
        return Suggestion(change, bytes_needed, self._executor_with_most_free_memory.fits(bytes_needed), reason)

    def _smaller(self, name: str, step: Step, free: int) -> Iterator[Suggestion]:
        """Yield a suggestion of the largest fitting size. If no size fits, suggest size 1. Yield nothing if the size is 1 now.

        Args:
            name: the size to reduce: `batch` or `tokens`.
            step: the work with its present size.
            free: free bytes of the device.
        """
        now = int(getattr(step, name))
        if now == 1:
            return
        variants: dict[str, Callable[[int], Step]] = {
            "batch": lambda size: attrs.evolve(step, batch=size),
            "tokens": lambda size: attrs.evolve(step, tokens=size),
        }
        bytes_needed, size = _largest(lambda size: self._needed_bytes(variants[name](size)), now, free)
        reason = "" if bytes_needed <= free else f"not even {name} {size} fits"
        yield Suggestion(f"--{name} {size}", bytes_needed, bytes_needed <= free, reason)

    def _spilling(self, fullest: Program, free: int) -> Suggestion:
        """Return the suggestion to spill values. It fits if the operands of the largest op fit into the memory limit.

        Args:
            fullest: the program that needs the most bytes.
            free: free bytes of the device.
        """
        device, least = self._executor_with_most_free_memory.device, with_allowance(fullest.peak.largest_step)
        if device.spill:
            room = free + device.spill
            reason = f"the executor has a memory limit and may spill {binary_size(device.spill)}. Steps take longer"
            return Suggestion(
                "none: the executor spills", fullest.needed, fullest.needed <= room and least <= BUDGET * free, reason
            )
        gib = math.floor(free / (1 << 30) * 100) / 100
        reason = (
            f"the executor spills at least {binary_size(fullest.needed - int(BUDGET * free))}, so steps take longer. The largest op "
            f"needs {binary_size(least)} in memory"
        )
        return Suggestion(f"djinn serve --memory-gib {gib:g}", least, least <= BUDGET * free, reason)

    def _more_executors(self, fullest: Program) -> Iterator[Suggestion]:
        """Yield the suggestion of 2, 4 or 8 executors: the smallest number on which the divided step fits, or else 8.

        The plan assumes that each has as much free memory as the executor with the most.
        """
        like = self._executor_with_most_free_memory.device
        for count in _SEVERAL:
            if count <= len(self.executors) or count * (like.memory_free or 0) < fullest.needed:
                continue
            devices = [attrs.evolve(like, id=f"{number}/{like.kind}:0") for number in range(count)]
            bytes_by_device = self._divided(self.step, devices)
            if bytes_by_device:
                reason = (
                    f"at most {binary_size(max(bytes_by_device.values()))} on each of {len(bytes_by_device)} devices"
                )
                yield Suggestion(
                    f"{count} executors with as much free memory", max(bytes_by_device.values()), True, reason
                )
                return
        yield Suggestion(
            f"{_SEVERAL[-1]} executors with as much free memory",
            fullest.needed,
            False,
            "no placement of the parts fits",
        )

    # --- as text --------------------------------------------------------------------------------------------------

    def lines(self, report: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of text for the user. `report`: the result of `described`."""
        step = self.step
        new_tokens_text = (
            f" and {step.new_tokens:,} new tokens" if step.kind == "decode" and step.new_tokens > 1 else ""
        )
        tokens = (
            f", {step.tokens:,} tokens each{new_tokens_text}"
            if self.model.own_inputs is None and "input_ids" in self._input_names
            else ""
        )
        with_ = f" with {step.optimizer}" if step.kind == "train" else ""
        yield f"{step.kind}{with_} of {step.batch} input{'s' if step.batch > 1 else ''}{tokens}"
        yield ""
        parts = ", ".join(f"{kind} {binary_size(size)}" for kind, size in report["memory"].items() if size)
        yield f"memory     {binary_size(report['needed'])} at most: {parts}"
        if report["cache_bytes"]:
            yield f"cache      {binary_size(report['cache_bytes'])} at the end, {report['cache_bytes_per_token']:,.0f} bytes per token"
        for executor in report["executors"]:
            free = (
                "free memory unknown"
                if executor["free"] is None
                else f"{binary_size(executor['free'])} of {binary_size(executor['memory'])} free"
            )
            verdict = "fits" if executor["fits"] else f"{binary_size(report['needed'] - executor['free'])} short"
            yield f"executor   {executor['server']} {executor['device']} {executor['name']}: {free}: {verdict}"
        for device, size in report["together"].items():
            yield f"divided    {device}: {binary_size(size)}"
        assumed = "" if report["measured_device"] else " (from assumed speeds; measure them with `djinn calibrate`)"
        if report["rate"]:
            yield f"speed      {report['rate']:,.3g} {report['rate_unit']}/s on the device{assumed}"
        yield ""
        yield "The model fits." if report["fits"] else "The model does not fit. Planned changes:"
        for executor in report["suggestions"]:
            yield f"  {'fits' if executor['fits'] else '    '}  {executor['change']:<42} {binary_size(executor['needed'])}{'; ' if executor['reason'] else ''}{executor['reason']}"


def _largest(needed: Callable[[int], int], current_size: int, free: int) -> tuple[int, int]:
    """Return the bytes that the largest fitting size needs, and that size. If no size fits, return these for size 1.

    Args:
        needed: function that returns the bytes that a size needs.
        current_size: the present size, which does not fit.
        free: free bytes.
    """
    low, high = (1, needed(1)), (current_size, needed(current_size))
    if low[1] > free:
        return low[1], 1
    for _ in range(_TRIES):
        slope = (high[1] - low[1]) / (high[0] - low[0])
        guess = min(high[0] - 1, max(low[0] + 1, int(low[0] + (free - low[1]) / slope))) if slope > 0 else low[0] + 1
        if guess <= low[0] or guess >= high[0]:
            break
        best = guess, needed(guess)
        if best[1] <= free:
            low = best
        else:
            high = best
    return low[1], low[0]


def _less_allowance(device: DeviceCapabilities) -> DeviceCapabilities:
    """Return the device without spilling. Its free memory is reduced by the allowance of `with_allowance`."""
    if device.memory_free is None:
        return attrs.evolve(device, spill=0)
    return attrs.evolve(device, memory_free=max(0, int((device.memory_free - SMALL) / ALLOWANCE)), spill=0)
