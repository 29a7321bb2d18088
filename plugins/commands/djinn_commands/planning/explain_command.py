"""Command `djinn explain`: shows each stage's decisions about programs of a script, or about a model without weights."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from djinn.hooks import Renderer
    from djinn.planning import PipelineResult
    from djinn_commands.planning.model import Step
    from djinn_commands.script import Script
    from djinn_core.registry.registry import Registry
    from djinn_core.wire.messages import TemplateDecision

_STAGES = ("annotate", "estimate", "optimize", "place", "schedule")
_SUMMARISED = 30  # maximum number of programs that are listed before the details


@click.command("explain", context_settings={"ignore_unknown_options": True})
@click.option("--until", type=click.Choice(_STAGES), default=_STAGES[-1], help="The last stage to show.")
@click.option(
    "--json", "as_json", is_flag=True, help="The same as --format json: print a list with one object per program."
)
@click.option("--format", "form", help="Output format: text (default), json, or a renderer's format, such as svg.")
@click.option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture to FILE.svg or FILE.html."
)
@click.option("--program", type=click.IntRange(1), help="Show only the program with this number.")
@click.option("--unfold", is_flag=True, help="List equal layers separately.")
@click.option("--depth", type=click.IntRange(0), help="Number of nested module levels to list.")
@click.option("--step", type=click.Choice(("forward", "decode", "train")), default="forward", help="What a model does.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Batch size of a model's inputs.")
@click.option("--tokens", type=click.IntRange(1), default=512, show_default=True, help="Tokens of each input.")
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def explain(
    target: str,
    arguments: tuple[str, ...],
    until: str,
    as_json: bool,
    form: str | None,
    picture: Path | None,
    program: int | None,
    unfold: bool,
    depth: int | None,
    **model: Any,
) -> None:
    """Show what each stage decides about programs, and why: as text, as JSON, or as a picture.

    A picture shows the longest program, or the one given by --program. Renderers of plugins draw it.

    TARGET is one of

    \b
    script.py        run it with ARGUMENTS, on the configured device
    config.json      the configuration of a Hugging Face model, or its folder
    module:function  a function that returns a model, or a model and its inputs

    Programs of a script with the same structure are planned and shown once. The script's output goes to standard
    error. A model is built without weights, and nothing is computed: --step, --batch and --tokens describe the work.

    Arguments after -- are passed to the script unchanged.
    """  # noqa: D301 - click looks for the character, not for its spelling
    from djinn_core.ir.result import without_later_stages

    if as_json and form not in {None, "json"}:
        raise click.UsageError(f"--json is --format json and contradicts --format {form}: remove --json or --format")
    form = "json" if as_json else form
    drawer = _Drawer.of(form, picture)  # made first, so that errors show before the script runs
    status, results, decisions = _results(target, arguments, _STAGES[-1] if drawer is not None else until, model)
    selected_results = _select_results(results, program)
    documents = [without_later_stages(result, until) for result in selected_results]
    if form == "json":
        _print_json(documents, unfold=unfold)
    elif not results:
        click.echo(
            f"{target} ran nothing on remote_accelerator: move a model or a tensor there with .to(...)",
            err=drawer is not None,
        )
    elif drawer is None or drawer.printer is None:
        _print_text(documents, program, unfold=unfold, depth=depth)
        _print_decisions(decisions)
    if drawer is not None:
        drawer.draw(selected_results)
    raise SystemExit(status)


def _results(
    target: str, arguments: tuple[str, ...], until: str, model: dict[str, Any]
) -> tuple[int, Sequence[PipelineResult], Sequence[TemplateDecision]]:
    """Return the exit status, the results of the stages for each program, and the executors' decisions."""
    path = Path(target)
    if path.is_dir() or path.suffix == ".json" or (":" in target and not path.exists()):
        from djinn_commands.planning.model import captured_model, step_of

        if arguments:
            raise click.UsageError(
                f"{target} is not a script, and only a script takes arguments: remove {' '.join(arguments)}"
            )
        with contextlib.redirect_stdout(sys.stderr):
            step: Step = step_of(**model)
            return 0, [captured_model(target, step, until)], ()
    if not path.is_file():
        raise click.BadParameter(
            f"there is no file {target}: name a script, a config.json, or module:function", param_hint="TARGET"
        )
    _refuse_options_of_models(model)
    from djinn_commands.script import Script

    return _run(Script(target, arguments))


def _refuse_options_of_models(names: Iterable[str]) -> None:
    """Raise an error if an option for models is used with a script."""
    context = click.get_current_context()
    flags = [f"--{name}" for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if flags:
        raise click.UsageError(
            f"{', '.join(flags)} works only for a config.json or module:function. To pass an option to the script, write it after --, as in "
            f"`djinn explain script.py -- {flags[0]} ...`"
        )


def _run(script: Script) -> tuple[int, Sequence[PipelineResult], Sequence[TemplateDecision]]:
    """Run the script. Return its exit status, the plans of its programs, and the executors' decisions about hot templates.

    If the script raises, return status 1 and the plans up to that moment.
    """
    from djinn_client.runtime.client import record_plans, template_decisions

    status = 0
    with record_plans() as plans, contextlib.redirect_stdout(sys.stderr):
        try:
            script.run()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if not isinstance(end.code, int | None):
                click.echo(end.code, err=True)
    return status, plans, template_decisions()


def _select_results(results: Sequence[PipelineResult], number: int | None) -> Sequence[PipelineResult]:
    if number is None:
        return results
    if number > len(results):
        raise click.BadParameter(
            f"program {number} does not exist: choose a number from 1 to {len(results)}", param_hint="--program"
        )
    return [results[number - 1]]


def _print_json(results: Sequence[PipelineResult], *, unfold: bool) -> None:
    from djinn.planning import explain as told

    click.echo(json.dumps([told(result, unfold=unfold).described for result in results], indent=2))


def _print_text(results: Sequence[PipelineResult], chosen: int | None, *, unfold: bool, depth: int | None) -> None:
    from djinn.planning import explain as told

    if len(results) > 1:
        _print_summary(results)
    for number, result in enumerate(results, 1):
        if len(results) > 1 or chosen is not None:
            click.secho(f"program {chosen or number}" + (f" of {len(results)}" if chosen is None else ""), bold=True)
        click.echo(str(told(result, unfold=unfold, depth=depth)))
        click.echo()


def _print_decisions(decisions: Sequence[TemplateDecision]) -> None:
    """Print the run strategy of each hot template, and why the executor chose it."""
    if decisions:
        click.secho("executor", bold=True)
    for one in decisions:
        click.echo(f"  template {one.template}, {one.ops:,} ops: {one.strategy} {one.decision}")


def _print_summary(results: Sequence[PipelineResult]) -> None:
    """Print one line per program, so that users can choose one."""
    from djinn_core.planning.units import duration

    click.secho(f"{len(results)} programs. Show program N with --program N, or fewer modules with --depth 1", bold=True)
    every = sum(map(_seconds, results))
    for number, result in enumerate(results[:_SUMMARISED], 1):
        workload = result.profile.workload.value if result.profile else ""
        share = f"{duration(_seconds(result))} {_seconds(result) / every:>4.0%}" if every else ""
        model = next(iter(result.graph.module_names.classes), "")
        click.echo(f"{number:>4}  {workload:<16} {len(result.graph.nodes):>6,} ops  {share:>14}  {model}".rstrip())
    if len(results) > _SUMMARISED:
        click.echo(f"      and {len(results) - _SUMMARISED} more")
    click.echo()


def _seconds(result: PipelineResult) -> float:
    """Return the sum of the ops' predicted seconds, or 0 if the result has no predictions."""
    return sum(result.costs.seconds(device) for device in result.costs.by_device) if result.costs else 0.0


@attrs.frozen
class _Drawer:
    """Draws programs with renderers of plugins.

    Attributes:
        registry: registry with the renderers.
        printer: renderer for standard output, or None.
        picture: path of the picture file, or None.
    """

    registry: Registry
    printer: Renderer | None
    picture: Path | None

    @classmethod
    def of(cls, form: str | None, picture: Path | None) -> _Drawer | None:
        """Return the drawer for the options --format and --picture, or None if they need no renderer.

        Raises:
            ConfigurationError: no renderer has the format or the file's suffix, or the folder does not exist.
        """
        is_own = form in {None, "text", "json"}
        if is_own and picture is None:
            return None
        from djinn_client.runtime.plugins import open_plugins
        from djinn_profiler.explain.rendering import renderer_for, renderer_of

        registry = open_plugins(kinds=("renderers",))  # without changing the script's configuration
        if picture is not None:
            renderer_for(picture, registry)
        return cls(registry, None if form is None or is_own else renderer_of(form, registry), picture)

    def draw(self, results: Sequence[PipelineResult]) -> None:
        """Draw the program with the longest predicted time."""
        from djinn_profiler.explain.rendering import render, renderer_for

        if not results:
            raise click.ClickException(
                "there is nothing to draw: the script ran no program on remote_accelerator. Move a model or a tensor there with .to(...)"
            )
        seconds = [_seconds(result) for result in results]
        longest = seconds.index(max(seconds))
        which = f"program {longest + 1} of {len(results)}, the longest" if len(results) > 1 else "the program"
        if self.printer is not None:
            click.echo(render(results[longest], self.printer, self.registry), nl=False)
        if self.picture is not None:
            picture = render(results[longest], renderer_for(self.picture, self.registry), self.registry)
            self.picture.write_bytes(picture)
            click.echo(f"{self.picture} shows {which}", err=True)
