"""Commands for jobs on the server's machine: `djinn submit`, `jobs`, `logs`, `stop` and `fetch`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from djinn_commands.connect.records import refuse_windows
from djinn_commands.connect.terminal_escapes import one_line

if TYPE_CHECKING:
    from djinn_commands.connect.jobs import Job
    from djinn_commands.connect.project_files import ProjectFiles
    from djinn_commands.connect.records import Record

_server_option = click.option(
    "--server", help="Name of the server (`djinn connect`). Default: the configured server, or the only server."
)


@click.command(name="submit", context_settings={"ignore_unknown_options": False})
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@_server_option
@click.option(
    "--project",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder that is sent. Default: the working directory if the script is in it, otherwise the script's folder.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Also send this path, even if .gitignore or its name excludes it. May be repeated.",
)
@click.option(
    "--limit-mib",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Largest total size of the sent files, in MiB.",
)
@click.option("--requirements/--no-requirements", "installs", default=True, help="Install the project's requirements.")
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Show the log until the job ends, and exit with the job's status. Ctrl-C ends the display, not the job.",
)
@click.option("--dry-run", is_flag=True, help="List the files without sending them.")
def submit(
    script: Path,
    arguments: tuple[str, ...],
    server: str | None,
    project: Path | None,
    include: tuple[str, ...],
    limit_mib: int,
    installs: bool,
    follow: bool,
    dry_run: bool,
) -> None:
    """Run SCRIPT as a job on the server's machine. The job continues when this machine sleeps.

    Djinn sends the project's files, except secrets and files that .gitignore excludes. It installs the requirements of
    requirements.txt or pyproject.toml for the job. ARGUMENTS, after `--`, are passed to the script.
    """
    from djinn_commands.connect import jobs as remote_jobs
    from djinn_commands.connect.project_files import find_files, objection, project_requirements

    record = _record(server)
    root = project or (Path.cwd() if script.resolve().is_relative_to(Path.cwd()) else script.resolve().parent)
    if not script.resolve().is_relative_to(root.resolve()):
        raise click.BadParameter(
            f"{script} is not in {root}, the folder to send: name a folder that contains it with --project"
        )
    relative = script.resolve().relative_to(root.resolve()).as_posix()
    if too_much := objection(_empty(root), 1):
        raise click.ClickException(too_much)
    files = find_files(root, (*include, f"/{relative}"))
    _print_selection(files)
    if too_much := objection(files, limit_mib << 20):
        raise click.ClickException(too_much)
    try:
        requirements = project_requirements(root) if installs else ()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if requirements:
        click.echo(f"installs the job's requirements, unless an earlier job did: {', '.join(requirements)}", err=True)
    if dry_run:
        for path, size in files.files.items():
            click.echo(f"{size:12,}  {_paths_text([path])}")
        return
    job, server_name = remote_jobs.submit(record, files, relative, arguments, requirements)
    if not server_name:
        click.echo(
            f"no server runs on {record.host}. If the script needs it, start it with `djinn connect {record.name}`",
            err=True,
        )
    click.echo(job)
    if follow:
        _follow(record, job)
    else:
        click.echo(f"`djinn logs -f {job} --server {record.name}` shows the job's output", err=True)


def _empty(root: Path) -> ProjectFiles:
    from djinn_commands.connect.project_files import ProjectFiles

    return ProjectFiles(root, {})


def _print_selection(files: ProjectFiles) -> None:
    click.echo(f"sends {len(files.files):,} files of {files.root.resolve()}, {_size(files.size)}", err=True)
    for path, size in files.largest(3):
        if size >= 1 << 20:
            click.echo(f"    {_size(size)}  {_paths_text([path])}", err=True)
    if files.ignored:
        click.echo(f"not sent, excluded by .gitignore: {files.ignored:,} files and folders", err=True)
    if files.secrets:
        click.echo(f"not sent, names of secrets (--include PATTERN sends them): {_paths_text(files.secrets)}", err=True)
    if files.links:
        click.echo(f"not sent, because they link to files outside the folder: {_paths_text(files.links)}", err=True)


@click.command(name="jobs")
@_server_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with one object per job.")
@click.option("--remove", metavar="JOB", help="Remove a job that has ended, with its remote log and files.")
def jobs(server: str | None, as_json: bool, remove: str | None) -> None:
    """List the jobs on the server's machine."""
    from djinn_commands.connect import jobs as remote_jobs

    record = _record(server)
    if remove:
        remote_jobs.remove_job(record, remove)
        click.echo(f"removed {remove}")
        return
    job_list = remote_jobs.list_jobs(record)
    if as_json:
        rows = [
            {
                "id": job.id,
                "state": job.state,
                "code": job.code,
                "begun": job.begun,
                "ended": job.ended if job.is_over else None,
                "command": job.command,
            }
            for job in job_list
        ]
        click.echo(json.dumps(rows, indent=2))
    elif not job_list:
        click.echo(f"no jobs on {record.name}")
    else:
        _print_table(job_list)


def _print_table(jobs: list[Job]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("job", "state", "status", "begun", "for", "command", box=None, pad_edge=False)
    for job in jobs:
        begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.begun))
        code = "" if job.code is None else str(job.code)
        table.add_row(job.id, job.state, code, begun, f"{job.ended - job.begun:,} s", Text(job.command))
    Console(highlight=False, soft_wrap=True).print(table)


@click.command(name="logs")
@click.argument("job")
@_server_option
@click.option(
    "-f", "--follow", is_flag=True, help="Follow the log until the job ends, then exit with the job's status."
)
def logs(job: str, server: str | None, follow: bool) -> None:
    """Show the output of JOB. JOB is a job's name or the unique beginning of a name."""
    from djinn_commands.connect import jobs as remote_jobs

    record = _record(server)
    if follow:
        _follow(record, job)
    else:
        remote_jobs.copy_log(record, job, sys.stdout.buffer, follow=False)


@click.command(name="stop")
@click.argument("job")
@_server_option
def stop(job: str, server: str | None) -> None:
    """Stop JOB and all its processes."""
    from djinn_commands.connect import jobs as remote_jobs

    ended_job = remote_jobs.stop_job(_record(server), job)
    click.echo(f"{ended_job.id}: {ended_job.state}")


@click.command(name="fetch")
@click.argument("job")
@click.argument("path")
@click.argument("into", type=click.Path(path_type=Path, file_okay=False), default=".")
@_server_option
def fetch(job: str, path: str, into: Path, server: str | None) -> None:
    """Copy PATH, a file or folder of JOB's working directory, into the local folder INTO (default: `.`)."""
    from djinn_commands.connect import jobs as remote_jobs

    copied_files = remote_jobs.fetch(_record(server), job, path, into)
    if copied_files.left_out:
        click.echo(f"not copied, special files and links out of {path}: {_paths_text(copied_files.left_out)}", err=True)
    click.echo(f"{into / path}: {copied_files.count:,} files, {_size(copied_files.size)}")


def _record(server: str | None) -> Record:
    """Return the record of the server named by `--server`, by `DJINN_SERVERS`, or the only connected server."""
    import os

    refuse_windows()
    from djinn_commands.connect.jobs import choose_record

    configured = [name.strip() for name in os.environ.get("DJINN_SERVERS", "").split(",") if name.strip()]
    return choose_record(server, configured)


def _follow(record: Record, job: str) -> None:
    """Print the log until the job ends, then exit the process with the job's exit status."""
    from djinn_commands.connect import jobs as remote_jobs

    try:
        ended_job = remote_jobs.copy_log(record, job, sys.stdout.buffer, follow=True)
    except KeyboardInterrupt:
        click.echo(
            f"\n{job} continues. Follow it with `djinn logs -f {job} --server {record.name}`, or end it with "
            f"`djinn stop {job} --server {record.name}`",
            err=True,
        )
        raise SystemExit(130) from None
    click.echo(f"{ended_job.id}: {ended_job.state}", err=True)
    raise SystemExit(ended_job.exit_code)


def _paths_text(paths: Iterable[str]) -> str:
    return ", ".join(map(one_line, paths))


def _size(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / 1024:.1f} KiB"
