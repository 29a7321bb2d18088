"""Python processes that need not import torch and Djinn first: they are forked from one that has.

An interpreter takes 1.3 s of a core for torch, one for what torch imports at the first op on a tensor subclass and at the
first meta kernel, one for Djinn with its plugins, and half a second at its end; a fork takes a tenth in all. What is started
this way is a process of its own in every other respect: its arguments, folder, environment, standard streams and end are those
that it would have. `import djinn` in a fork registers the device there.

Not for what looks at how an interpreter begins and ends: command lines in `/proc`, what is imported when, objects that are
finalized with the modules.

Executors and servers that tests, benchmarks and forked servers start are forked as well (`executors_forked`); servers that
`fresh_python` starts, and their executors, are interpreters of their own.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import copy
import ctypes
import fcntl
import gc
import importlib.metadata
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from pathlib import Path

IMPORTED = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "aiohttp",
    "blake3",
    "cryptography.x509",
    "huggingface_hub",
    "msgspec",
    "networkx",
    "numpy",
    "pluggy",
    "psutil",
    "rich.console",
    "scipy.optimize",  # transformers imports it
    "structlog",
    "tokenizers",
)
FOLDER = str(Path.cwd())
SCRIPT = str(Path(sys.executable).with_name("djinn"))
SERVE = ([SCRIPT, "serve"], [sys.executable, "-m", "djinn_core.cli", "serve"])
HUGE, MADV_COLLAPSE = 2 << 20, 25
HOLDER = ("-P", "-m", "djinn_server.launch.piped_holder")


FORKING = """\
#!{python} -ES
import os, signal, socket, sys
sys.path.insert(0, {shared!r})
from prepared_python import Forks
forks = Forks(socket.socket(fileno=int(os.environ["FORKS"])))
streams = {{"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}}
started = forks.start(*{command!r}, *sys.argv[1:], env=dict(os.environ), cwd=os.getcwd(), **streams)
signal.signal(signal.SIGTERM, lambda *_: started.terminate())
os._exit(started.wait() % 256)
"""


def write_forking(file, command=()):
    """Write an executable that has `python *command` forked with its arguments; the environment has the descriptor of `Forks` as FORKS."""
    file.write_text(FORKING.format(python=sys.executable, shared=str(Path(__file__).parent), command=list(command)))
    file.chmod(0o755)


class Forks:
    """Orders forks of the process that has imported torch; `control` is the other end of what it reads orders from."""

    def __init__(self, control):
        self._control = control
        self._starting = threading.Lock()

    @property
    def descriptor(self):
        """Of `control`, which a process that inherits it can use as well."""
        return self._control.fileno()

    def start(self, *arguments, env, cwd=None, stdin=None, stdout=None, stderr=None, pass_fds=(), **others):
        """Begin what `python *arguments` would be; streams are files, or None for nothing.

        Others: `group` for a process group of its own; `finalize` to take the modules apart at the end, as interpreters do.
        """
        order = {"arguments": [str(a) for a in arguments], "environment": env, "folder": str(cwd or FOLDER)}
        order |= {"descriptors": list(pass_fds)} | others
        ours, theirs = socket.socketpair()
        with theirs, Path(os.devnull).open("r+b") as nothing:
            streams = [(stream or nothing).fileno() for stream in (stdin, stdout, stderr)]
            with self._starting:
                passed = [theirs.fileno(), self._control.fileno(), *streams, *pass_fds]
                socket.send_fds(self._control, [b"!"], passed)
        ours.sendall(json.dumps(order).encode() + b"\n")
        return StartedPython(arguments, ours)

    def start_captured(self, *arguments, env, cwd=None, **others):
        """The same; `communicate` gives what it wrote to its two streams."""
        out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when they were read
        process = self.start(*arguments, env=env, cwd=cwd, stdout=out, stderr=err, **others)
        process.open += [out, err]
        return process

    def start_talking(self, *arguments, env, cwd=None):
        """The same; `stdin` and `stdout` are pipes, for text."""
        with contextlib.ExitStack() as theirs:
            pipes = [os.pipe(), os.pipe()]
            given, said = (theirs.enter_context(os.fdopen(end, "rb", 0)) for end in (pipes[0][0], pipes[1][1]))
            process = self.start(*arguments, env=env, cwd=cwd, stdin=given, stdout=said)
        process.stdin, process.stdout = os.fdopen(pipes[0][1], "w"), os.fdopen(pipes[1][0])
        process.open += [process.stdin, process.stdout]
        return process

    def run(self, *arguments, env, cwd=None, timeout=600, **others):
        """Run it to its end, as `subprocess.run` does with `capture_output` and `text`."""
        with self.start_captured(*arguments, env=env, cwd=cwd, **others) as process:
            out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def close(self):
        with self._control:
            self._control.sendall(b".")  # forks that run still have this end of it, too


class PreparedPython(Forks):
    """The process that is forked. Each started process belongs to its starter; this one ends with `close`.

    Args:
        environment: its own, until it is forked.
        address: of a Unix socket at which other processes order forks, too (`SharedPython`); empty: they do not.
    """

    def __init__(self, environment, address=""):
        control, other = socket.socketpair()
        super().__init__(control)
        with contextlib.ExitStack() as theirs:
            given = [theirs.enter_context(other).fileno()]
            if address:
                listener = theirs.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(address)
                listener.listen()
                given.append(listener.fileno())
            self._process = subprocess.Popen(
                # `djinn.testing` knows executors, which are forks, by the last word.
                [sys.executable, __file__, *map(str, given), "djinn"],
                pass_fds=given,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def close(self):
        super().close()
        self._process.wait(300)


class SharedPython(Forks):
    """The same process, which another one has started and ends."""

    def __init__(self, address):
        control = socket.socket(socket.AF_UNIX)
        control.connect(address)
        super().__init__(control)


class StartedPython:
    """One that was forked; has what tests use of `subprocess.Popen`."""

    def __init__(self, args, status):
        self.args, self.returncode, self.open, self.stdin = args, None, [], None
        self._status = status.detach()
        self._reading = threading.Lock()
        weakref.finalize(self, os.close, self._status)
        self.pid = int(self._read_line())

    def _read_line(self):
        line = b""
        while (byte := os.read(self._status, 1)) not in {b"", b"\n"}:
            line += byte
        return line

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            with self._reading:  # several threads may wait
                if self.returncode is None:
                    self.returncode = int(self._read_line())
        return self.returncode

    def communicate(self, timeout=None):
        self.wait(timeout)
        said = []
        for file in self.open:
            file.seek(0)
            said.append(file.read())
        return tuple(said)

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since, and was reaped
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        self.wait()
        for file in self.open:
            with contextlib.suppress(BrokenPipeError):
                file.close()


class Worker:
    """A process that Djinn asks one thing, with `subprocess.run`: begins when it is given its input."""

    def __init__(self, forks, command, env, stderr=None, **_):
        self.args, self.returncode = command, None
        self._forks, self._environment, self._said = forks, env, stderr
        self._process = None

    def communicate(self, input=None, timeout=None):  # noqa: A002 - as `subprocess.Popen` has it
        with contextlib.ExitStack() as files:
            given, out, err = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            given.write(input)
            given.seek(0)
            shown = err if self._said == subprocess.PIPE else files.enter_context(os.fdopen(os.dup(2), "wb", 0))
            streams = {"stdin": given, "stdout": out, "stderr": shown}
            self._process = self._forks.start(*self.args[1:], env=self._environment, **streams)
            self.returncode = self._process.wait(timeout)
            out.seek(0)
            err.seek(0)
            return out.read(), err.read()

    def poll(self):
        return self.returncode

    def kill(self):
        self._process.kill()

    def wait(self):
        self.returncode = self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def executors_forked(forks):
    """A `subprocess.Popen` for which executors, their holders and workers and `djinn serve` are forks, and all else is what it was."""

    class Popen(subprocess.Popen):
        def __new__(cls, command, *_, **options):
            if tuple(command[-3:]) == HOLDER:  # whatever stands before it
                return start_piped(forks, HOLDER, options["env"])
            if isinstance(command, list) and options.keys() <= {"env", "stdin", "stdout", "stderr"}:
                for serve in SERVE:
                    if command[: len(serve)] == serve:
                        return start_server(forks, command[len(serve) :], **options)
            if (
                not isinstance(command, list)
                or command[1:3] != ["-P", "-m"]
                or not command[3].startswith("djinn_core.")
            ):
                return super().__new__(cls)
            if "--report-fd" in command:
                return start_executor(forks, command[1:], options["env"], options["pass_fds"])
            if "compile_worker" in command[3]:
                return start_piped(forks, command[1:], options["env"], options["stderr"])
            return Worker(forks, command, **options)

    return Popen


def start_server(forks, arguments, env=None, stdin=None, stdout=None, stderr=None):
    """`djinn serve` with its output in files, or nowhere."""
    streams = {"stdout": stdout, "stderr": stderr}
    with contextlib.ExitStack() as inherited:
        for number, (name, stream) in enumerate(streams.items(), 1):
            if stream is None:
                streams[name] = inherited.enter_context(os.fdopen(os.dup(number), "wb", 0))
            elif stream == subprocess.DEVNULL:
                streams[name] = None
        return forks.start(
            "-m", "djinn_core.cli", "serve", *arguments, env=dict(os.environ if env is None else env), **streams
        )


def start_executor(forks, arguments, environment, pass_fds):
    """Process that `djinn_server.launch` starts, with the streams that it asks for."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        folder = None
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as given, os.fdopen(os.dup(2), "wb", 0) as said:
        streams = {"stdin": given, "stderr": said, "pass_fds": pass_fds}
        started = forks.start(*arguments, env=environment, cwd=folder, group=True, **streams)
    started.stdin = os.fdopen(writing, "wb", 0)
    return started


def start_piped(forks, arguments, environment, errors=None):
    """Process whose `stdin` and `stdout` are pipes: one of `PipedCalls`, without the command before it, or a compiler's."""
    given, calls = os.pipe()
    answers, said = os.pipe()
    with (
        os.fdopen(given, "rb", 0) as stdin,
        os.fdopen(said, "wb", 0) as stdout,
        os.fdopen(os.dup(2 if errors is None else errors.fileno()), "wb", 0) as stderr,
    ):
        started = forks.start(*arguments, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, group=True)
    started.stdin, started.stdout = os.fdopen(calls, "wb", 0), os.fdopen(answers, "rb")
    return started


# --- in the process that is forked, and in its forks -----------------------------------------------------------------


def prepare(control, listener=None):
    """Import, then fork for every order that comes, and tell how each fork ends. Returns in forks only: the order.

    Ends after the last of its forks, once it is told to by `control`. Others that order forks connect to `listener`.
    """
    gc.disable()  # what is imported stays
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # builds of torch may lack some; forks that need it say so themselves
            importlib.import_module(name)
    import_djinn()
    import_transformers()
    gc.collect()
    gc.freeze()  # collections in forks would copy all of it
    gc.enable()
    use_huge_pages()
    running = {}  # by the descriptor of a fork's process: where its end is told
    ended = []  # open still, for forks that run and have their other ends
    events = select.poll()
    sources = {one.fileno(): one for one in (control, listener) if one is not None}
    for source in sources:
        events.register(source, select.POLLIN)
    while running or control.fileno() in sources:
        for ready, _ in events.poll():
            if ready in running:
                events.unregister(ready)
                tell_end(ready, running.pop(ready))
                continue
            if sources[ready] is listener:
                source = listener.accept()[0]
                sources[source.fileno()] = source
                events.register(source, select.POLLIN)
                continue
            descriptors = socket.recv_fds(sources[ready], 1, 16)[1]
            if not descriptors:  # it orders no more
                events.unregister(ready)
                ended.append(sources.pop(ready))
                continue
            fork = os.fork()
            if fork == 0:
                for process, status in running.items():
                    os.close(process)
                    os.close(status)
                for source in (*sources.values(), *ended):
                    source.close()
                return begin(*descriptors)
            status, *others = descriptors
            for descriptor in others:
                os.close(descriptor)
            tell(status, fork)
            process = os.pidfd_open(fork)
            running[process] = status
            events.register(process, select.POLLIN)
    os._exit(0)


def use_huge_pages():
    """Put the heap into huge pages, where the system can: a fork and its end then take a third of the time."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError, OSError):
        libc.malloc_trim(0)
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, permissions, _, _, inode, *name = line.split()
            if "w" in permissions and inode == "0" and name in ([], ["[heap]"]):
                begin, end = (int(address, 16) for address in span.split("-"))
                begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
                if begin < end:
                    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def import_djinn():
    """Import Djinn and its plugins as a server does, which leaves the device alone. Forks that import `djinn` register it."""
    import djinn_core
    from djinn_core.system import role

    role.become_server("gateway")
    importlib.import_module("djinn")
    for found in pkgutil.walk_packages(djinn_core.__path__, "djinn_core."):
        if not found.name.endswith(("__main__", "notebook.magics")):  # the latter needs IPython
            importlib.import_module(found.name)
    for point in importlib.metadata.entry_points(group="djinn"):
        importlib.import_module(point.module)
    # What forks find in the memo tables of pure functions: the ops that travel, what is installed, what hooks must be like.
    from djinn_core.ir.operators import operators_digest
    from djinn_core.registry.builtin_plugins import builtin_plugins
    from djinn_core.registry.discovery import integrating
    from djinn_core.registry.registry import Selection, load_registry

    operators_digest()
    integrating()
    load_registry(Selection(), builtins=builtin_plugins())
    role._role = "client"
    device = sys.modules.pop("djinn")
    sys.meta_path.insert(0, ImportedBefore({"djinn": device}, lambda: device.__spec__.loader.exec_module(device)))


def import_transformers():
    """Import what `import transformers` does, which takes a second, for forks that will import it."""
    try:
        importlib.import_module("transformers.models")
    except ImportError:
        return
    names = [name for name in sys.modules if name.partition(".")[0] == "transformers"]
    sys.meta_path.insert(0, ImportedBefore({name: sys.modules.pop(name) for name in names}))


class ImportedBefore:
    """Finds modules that were imported before, and are in no table of modules until they are imported again."""

    def __init__(self, modules, run=None):
        self._modules = {name: (module, module.__spec__) for name, module in modules.items()}
        self._run = run

    def find_spec(self, name, path=None, target=None):
        if name not in self._modules:
            return None
        spec = copy.copy(self._modules[name][1])
        spec.loader = self
        return spec

    def create_module(self, spec):
        return self._modules[spec.name][0]

    def exec_module(self, module):
        module.__spec__ = self._modules[module.__name__][1]
        if self._run is not None:
            self._run()


def tell(status, number):
    with contextlib.suppress(BrokenPipeError):  # its starter has ended
        os.write(status, f"{number}\n".encode())


def tell_end(process, status):
    """Reap a fork."""
    ended = os.waitid(os.P_PIDFD, process, os.WEXITED)
    tell(status, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
    os.close(process)
    os.close(status)


def begin(status, forks, *passed):
    """In a fork: take its order, and the streams and descriptors that it is given."""
    with socket.socket(fileno=status) as told, told.makefile("r") as lines:
        order = json.loads(lines.readline())
    numbers = [0, 1, 2, *order["descriptors"]]
    given = (*passed, forks)
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for number in given]
    for number in given:
        os.close(number)
    for number, held in zip(numbers, high, strict=False):
        os.dup2(held, number)
        os.close(held)
    if order.get("group"):
        os.setpgid(0, 0)
    subprocess.Popen = executors_forked(Forks(socket.socket(fileno=high[-1])))
    return order


def become(order):
    """Be what `python *arguments` would be there."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in sys.path]
    sys.path[1:1] = added
    ran = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    for file in (Path(entry, "sitecustomize.py") for entry in added):
        if file.exists() and not (ran and file.samefile(ran)):
            exec(compile(file.read_bytes(), file, "exec"), {"__name__": "sitecustomize"})
    arguments = order["arguments"]
    if isolated := arguments[0] == "-P":
        arguments = arguments[1:]
    while arguments[0] == "-W":
        action, _, category = arguments[1].partition("::")
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))
        sys.warnoptions.append(arguments[1])
        arguments = arguments[2:]
    if arguments[0] == "-m":
        sys.path[:1], sys.argv = [] if isolated else [order["folder"]], arguments[1:]
        if not hasattr(sys.modules.get(arguments[1]), "__path__"):
            sys.modules.pop(arguments[1], None)  # it runs as `__main__`; what imports it gets another one, as ever
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    if arguments[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *arguments[2:]]
        code = compile(arguments[1], "<string>", "exec")
    else:
        file = Path(arguments[0])
        sys.path[0], sys.argv = str(file.resolve().parent), arguments
        main.__file__ = str(file)
        code = compile(file.read_bytes(), file, "exec")
    sys.modules["__main__"] = main
    exec(code, vars(main))


def end_of(order):
    """Run the order to its end, with the exit status that `python` would have."""
    try:
        become(order)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGINT
    else:
        return 0
    return 1


def leave(status, finalize):
    """End as an interpreter does, but for taking its modules and kernels apart: that would copy all that the fork shares."""
    if finalize:
        sys.exit(status)
    keep_kernels()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # as an interpreter says that it could not
            status = status or 120
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 255)


def keep_kernels():
    """Leave what libraries of kernels registered in the dispatcher, which goes through all of its tables."""
    for finalizer in list(weakref.finalize._registry):
        found = finalizer.peek()
        if found is not None and getattr(found[1], "__name__", "") == "_del_library":
            finalizer.atexit = False


if __name__ == "__main__":
    this = sys.modules["__main__"]  # stays while its own functions run
    taken = prepare(*(socket.socket(fileno=int(number)) for number in sys.argv[1:-1]))
    leave(end_of(taken), taken.get("finalize"))
