"""Jobs on a remote machine: the user's processes, each with a folder of files that record its state."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import secrets
import shlex
import tarfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Final, cast

import attrs

from djinn_commands.connect.connecting import configuration_error, connected, failure
from djinn_commands.connect.keeper import is_final
from djinn_commands.connect.project_files import ProjectFiles
from djinn_commands.connect.records import Record, find_record, list_records, user_id
from djinn_commands.connect.ssh import BROKEN, Script, ScriptResult, SshConnection
from djinn_commands.connect.terminal_escapes import LogEscaper, one_line
from djinn_commands.connect.wheels import archive

if TYPE_CHECKING:
    from djinn.errors import ConfigurationError

_STOP_SECONDS: Final = 15
_RECONNECT_SECONDS: Final = 2.0
# Of `jobs.sh`: name, state, exit status, begin, end, now, command.
_JOB_LINE: Final = re.compile(
    r"([\w-]{1,200})\t(preparing|running|done|failed|stopped|lost)\t(-?\d{1,9}|)\t(\d{1,11})\t(\d{1,11}|)\t(\d{1,11})\t(.*)",
    re.ASCII,
)
_FINAL_STATES: Final = frozenset({"done", "failed", "stopped", "lost"})


@attrs.frozen
class Job:
    """A job, as read from its remote folder.

    Attributes:
        id: name of the job.
        state: `preparing`, `running`, `done`, `failed`, `stopped`, or `lost` if its process vanished.
        code: exit status, or None if the job recorded none.
        begun: Unix time of the start, in seconds.
        ended: Unix time of the end, in seconds. Without a recorded end, it is the time of the query.
        command: script and arguments.
    """

    id: str
    state: str
    code: int | None
    begun: int
    ended: int
    command: str

    @property
    def is_over(self) -> bool:
        """Return True if the job is neither preparing nor running."""
        return self.state in _FINAL_STATES

    @property
    def exit_code(self) -> int:
        """Return the job's exit status, or 1 if the job recorded none."""
        return 1 if self.code is None else self.code


def read_jobs(text: str) -> list[Job]:
    """Return the jobs in the output of `jobs.sh`, sorted by start.

    Raises:
        ValueError: a line is malformed; the message shows it.
    """
    job_list = []
    for line in text.splitlines():
        if line.count("\t") != 6:  # other output of the login shell
            continue
        match = _JOB_LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{one_line(line[:200])!r} is not a valid line of the job list")
        name, state, code, begun, end_time, now, command = match.groups()
        job_list.append(
            Job(name, state, int(code) if code else None, int(begun), int(end_time or now), one_line(command))
        )
    return sorted(job_list, key=lambda job: (job.begun, job.id))


def choose_record(server: str | None, configured: Sequence[str]) -> Record:
    """Return the record of the server that a job command addresses.

    Args:
        server: the name of the option `--server`, or None.
        configured: names of the setting `servers`. If both arguments are empty, the only recorded server is chosen.

    Raises:
        ConfigurationError: no server matches, several match, or `djinn connect` did not set up the server.
    """
    records = list_records()
    names = [server] if server else list(configured) or [record.name for record in records]
    if len(names) == 1 and (record_of_name := find_record(names[0])) is not None:
        return record_of_name
    raise _no_server(names, [record.name for record in records])


def _no_server(names: Sequence[str], known_names: Sequence[str]) -> ConfigurationError:
    if not names:
        return configuration_error(
            "jobs need a server that `djinn connect` set up, and there is none: run `djinn connect USER@HOST`"
        )
    if len(names) > 1:
        return configuration_error(
            f"the job command matches several servers: choose one of {', '.join(names)} with --server"
        )
    there = f"choose one of {', '.join(known_names)} with --server, or " if known_names else ""
    return configuration_error(
        f"jobs need a server that `djinn connect` set up, and {names[0]!r} is none: {there}run `djinn connect USER@HOST --name NAME` with a new "
        "NAME. On a Ray cluster, use `ray job submit` (docs/servers.md)"
    )


def new_id(script: str) -> str:
    """Return a new job name: the script's name, the time, and a random suffix."""
    stem = "".join(mark if mark.isalnum() and mark.isascii() else "-" for mark in Path(script).stem).strip("-")[:24]
    return f"{stem or 'job'}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def submit(
    record: Record, project: ProjectFiles, script: str, arguments: Sequence[str], requirements: Sequence[str]
) -> tuple[str, bool]:
    """Send the project and start a job. Return the job's name, and True if a server runs on the machine.

    Args:
        record: the server.
        project: files to send.
        script: path of the script, relative to the project's folder.
        arguments: arguments of the script.
        requirements: lines in pip's requirements format, to install for the job.

    Raises:
        StartupError: the job could not be started.
        TransportError: the connection failed, or broke before the job began.
    """
    job = new_id(script)
    description = {
        "id": job,
        "server": record.name,
        "script": script,
        "arguments": list(arguments),
        "requirements": list(requirements),
    }
    texts = {
        "job.json": json.dumps(description),
        "shown": shlex.join([script, *arguments]).replace("\n", " ").replace("\t", " "),
        "job_runner.py": files("djinn_commands.connect").joinpath("job_runner.py").read_text(),
    }
    uploads = {f"files/{path}": project.root / path for path in project.files}
    with connected(record) as connection:
        output = _run(
            record,
            connection,
            f"submitting job {job}",
            Script(("submit",), {**record.script_variables, "job": job}),
            uploads,
            texts,
        )
    return job, "no server" not in output


def list_jobs(record: Record, job: str = "") -> list[Job]:
    """Return the jobs on the server's machine whose names begin with `job`. By default, return all.

    Raises:
        StartupError: the remote script failed.
        TransportError: the connection failed or broke.
    """
    with connected(record) as connection:
        return _list(record, connection, job)


def find_job(record: Record, job: str) -> Job:
    """Return the job named `job`, or else the only job whose name begins with `job`.

    Raises:
        ConfigurationError: no job matches, or several match.
        StartupError: the remote script failed.
        TransportError: the connection failed or broke.
    """
    with connected(record) as connection:
        return _find(record, connection, job)


def copy_log(record: Record, job: str, to: IO[bytes], *, follow: bool) -> Job:
    """Write the log of a job to `to`, and return the job as it is after the last byte.

    With `follow`, wait for new output until the job has ended. If the connection breaks, reconnect and continue at the same
    offset of the log. If `to` is a terminal, escape control sequences other than colours.

    Raises:
        ConfigurationError: the job does not exist.
        StartupError: the remote script failed.
        TransportError: the connection failed, or broke without `follow`.
    """
    job = find_job(record, job).id
    position, text = 0, LogEscaper() if to.isatty() else None
    while True:
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(connected(record))
            except ConnectionError as error:
                if not position or is_final(str(error)):
                    raise
                time.sleep(_RECONNECT_SECONDS)
                continue
            values = {"job": job, "from": str(position + 1), "follow": "yes" if follow else "no"}
            with connection.running(Script(("logs",), {**record.script_variables, **values})) as process:
                stream = cast("IO[bytes]", process.stdout)
                while part := stream.read1(1 << 16):  # type: ignore[attr-defined]
                    to.write(part if text is None else text.add(part).encode(errors="replace"))
                    to.flush()
                    position += len(part)
                code = process.wait()
            if text is not None and (code != BROKEN or not follow):  # flush a cut character or colour
                to.write(text.add(b"", last=True).encode(errors="replace"))
                to.flush()
            if code != BROKEN:
                return _find(record, connection, job)
            if not follow:
                raise failure(f"reading the log of job {job}", record.host, ScriptResult(code, "", ""))
            time.sleep(_RECONNECT_SECONDS)


def stop_job(record: Record, job: str) -> Job:
    """End all processes of a job. Return the job with its final state.

    Raises:
        ConfigurationError: the job does not exist.
        StartupError: the remote script failed.
        TransportError: the connection failed or broke.
    """
    with connected(record) as connection:
        name = _find(record, connection, job).id
        values = {"job": name, "seconds": str(_STOP_SECONDS)}
        _run(record, connection, f"stopping job {name}", Script(("stop",), {**record.script_variables, **values}))
        return _find(record, connection, name)


def remove_job(record: Record, job: str) -> None:
    """Remove a job that has ended, with its remote log and files.

    Raises:
        ConfigurationError: the job does not exist.
        StartupError: the job is running, or the remote script failed.
        TransportError: the connection failed or broke.
    """
    with connected(record) as connection:
        name = _find(record, connection, job).id
        _run(record, connection, f"removing job {name}", Script(("remove",), {**record.script_variables, "job": name}))


@attrs.define
class FetchedFiles:
    """Result of copying files from a job.

    Attributes:
        count: number of copied files.
        size: bytes of the copied files.
        left_out: special files, and links that lead out of the requested path. They were not copied.
    """

    count: int = 0
    size: int = 0
    left_out: list[str] = attrs.field(factory=list)


def fetch(record: Record, job: str, path: str, into: Path) -> FetchedFiles:
    """Copy a file or folder of a job into a local folder.

    Only `into / path` and files below it are written, even if the remote machine sends other names.

    Args:
        record: the server.
        job: name of the job.
        path: path below the job's working directory.
        into: a local folder, created if it is missing.

    Raises:
        ConfigurationError: the job does not exist, or `path` leads out of its working directory.
        StartupError: `path` does not exist, or the remote machine sent a file outside it.
        TransportError: the connection failed or broke.
    """
    wanted_path = PurePosixPath(path)
    if wanted_path.is_absolute() or ".." in wanted_path.parts or not wanted_path.parts:
        raise configuration_error(
            f"cannot fetch {path!r}: name a path relative to the job's working directory, such as out/model.pt"
        )
    into.mkdir(parents=True, exist_ok=True)
    result = FetchedFiles()
    with connected(record) as connection:
        name = _find(record, connection, job).id
        with connection.running(
            Script(("fetch",), {**record.script_variables, "job": name, "path": str(wanted_path)})
        ) as process:
            try:
                with tarfile.open(fileobj=process.stdout, mode="r|") as archived:
                    _unpack(archived, wanted_path, into, result)
                code = process.wait()
            except tarfile.ReadError:  # the archive is empty or incomplete
                code = process.wait() or BROKEN
    if code:
        raise failure(f"fetching {path} of job {name}", record.host, ScriptResult(code, "", ""))
    return result


def _unpack(archived: tarfile.TarFile, remote_path: PurePosixPath, into: Path, fetched: FetchedFiles) -> None:
    archived.extraction_filter = lambda member, _: member  # `_safe` has checked the member
    for member in archived:
        name = PurePosixPath(member.name)
        if not name.is_relative_to(remote_path) or ".." in name.parts:
            from djinn.errors import StartupError

            raise StartupError(
                f"the remote machine sent {member.name!r} instead of {remote_path}: the fetch was stopped"
            )
        alone = name == remote_path and not member.isdir()
        folder = into / (remote_path.parent if alone else remote_path)
        target = (
            None
            if alone and not member.isfile()
            else _safe(member, remote_path.parent if alone else remote_path, folder)
        )
        if target is None:
            fetched.left_out.append(member.name)
            continue
        archived.extract(target, folder)
        if target.isfile():
            fetched.count, fetched.size = fetched.count + 1, fetched.size + target.size


def _safe(member: tarfile.TarInfo, above: PurePosixPath, folder: Path) -> tarfile.TarInfo | None:
    """Return a copy of an archive member with a name relative to `above`, or None if it must not be unpacked into `folder`.

    Special files and links that lead out of `folder` must not be unpacked.
    """
    below = copy.copy(member)
    below.name = PurePosixPath(member.name).relative_to(above).as_posix()
    if member.islnk():
        if not PurePosixPath(member.linkname).is_relative_to(above):
            return None
        below.linkname = PurePosixPath(member.linkname).relative_to(above).as_posix()
    if hasattr(tarfile, "data_filter"):
        try:
            return tarfile.data_filter(below, str(folder))
        except tarfile.FilterError:
            return None
    # Python 3.11.3 and earlier: refuse all links.
    below.mode &= 0o755
    below.uid, below.uname, below.gname = user_id(), "", ""
    return below if member.isfile() or member.isdir() else None


def _list(record: Record, connection: SshConnection, job: str) -> list[Job]:
    output = _run(record, connection, "listing jobs", Script(("jobs",), {**record.script_variables, "job": job}))
    try:
        return read_jobs(output)
    except ValueError as error:
        from djinn.errors import StartupError

        raise StartupError(f"{record.host} sent an invalid list of jobs: {error}") from error


def _find(record: Record, connection: SshConnection, job: str) -> Job:
    if not job or not all(mark.isascii() and (mark.isalnum() or mark in "-_") for mark in job):
        raise configuration_error(f"{job!r} is not a job name: `djinn jobs --server {record.name}` lists the jobs")
    listing = _list(record, connection, job)
    exact = [one for one in listing if one.id == job]
    if len(exact or listing) != 1:
        there = ", ".join(one.id for one in listing or _list(record, connection, "")[-8:]) or "none"
        raise configuration_error(
            f"{'several jobs have names that begin with' if listing else 'there is no job'} {job!r} on {record.name}: choose from {there}"
        )
    return (exact or listing)[0]


def _run(
    record: Record,
    connection: SshConnection,
    title: str,
    script: Script,
    sent: dict[str, Path] | None = None,
    texts: dict[str, str] | None = None,
) -> str:
    result = connection.run(script, archive(sent or {}, texts) if texts else None)
    if result.code:
        raise failure(title, record.host, result)
    return result.output
