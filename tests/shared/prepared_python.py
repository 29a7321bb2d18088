"""Fork Python processes from a prepared process that has imported torch and Djinn.

A new interpreter spends 1.3 s of a core on torch, 1 s on modules that torch imports at its first ops, 1 s on Djinn with its plugins,
and 0.5 s at its end. A fork spends a tenth of that in all. A fork has its own arguments, folder, environment, standard streams and exit
status. `import djinn` registers the device in the fork. The executors of a fork are forks too.

Not for tests of how an interpreter begins and ends: command lines in `/proc`, what is imported when, objects that are finalized
with the modules.

The prepared process is Djinn's own fork server (setting `prepared_seconds`), which also begins programs that are no executors.
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

from djinn_launchers.fork_server_client import ForkedExecutor
from djinn_server.launch import process as executor_process
from djinn_server.launch.command import EXECUTOR_MODULE, executor_command, executor_environment

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
HUGE, MADV_COLLAPSE = 2 << 20, 25
PR_SET_PDEATHSIG = 1
SECONDS = 300.0


FORKING = """\
#!{python} -E
import os, signal, sys
sys.path.insert(0, {shared!r})
from prepared_python import Forks
streams = {{"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}}
started = Forks({address!r}).start(*{command!r}, *sys.argv[1:], env=dict(os.environ), cwd=os.getcwd(), **streams)
signal.signal(signal.SIGTERM, lambda *_: started.terminate())
os._exit(started.wait() % 256)
"""


class Forks:
    """Start forks of the prepared process that listens at a Unix socket."""

    def __init__(self, address):
        self.address = address

    def start(self, *arguments, env, cwd=None, stdin=None, stdout=None, stderr=None, pass_fds=(), **others):
        """Start `python *arguments` as a fork. Streams are files, or None for /dev/null."""
        order = {"arguments": [str(a) for a in arguments], "environment": env, "folder": str(cwd or FOLDER)}
        order |= {"descriptors": list(pass_fds)} | others
        said = json.dumps(order).encode()
        server = self._connect()
        with Path(os.devnull).open("r+b") as nothing:
            streams = [(stream or nothing).fileno() for stream in (stdin, stdout, stderr)]
            socket.send_fds(server, [len(said).to_bytes(4, "little")], [*streams, *pass_fds])
            server.sendall(said)
        return StartedPython(arguments, server)

    def begin(self):
        """Do nothing: the process that made this object has started the prepared process."""

    def _connect(self):
        """Return a connection to the prepared process. Retry while the process starts."""
        self.begin()
        deadline = time.monotonic() + SECONDS
        server = socket.socket(socket.AF_UNIX)
        while True:
            try:
                server.connect(self.address)
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return server

    def start_captured(self, *arguments, env, cwd=None, **others):
        """Start a fork whose `communicate` returns the contents of its two output streams."""
        out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when they were read
        process = self.start(*arguments, env=env, cwd=cwd, stdout=out, stderr=err, **others)
        process.open += [out, err]
        return process

    def start_talking(self, *arguments, env, cwd=None):
        """Start a fork whose `stdin` and `stdout` are text pipes."""
        with contextlib.ExitStack() as theirs:
            pipes = [os.pipe(), os.pipe()]
            given, said = (theirs.enter_context(os.fdopen(end, "rb", 0)) for end in (pipes[0][0], pipes[1][1]))
            process = self.start(*arguments, env=env, cwd=cwd, stdin=given, stdout=said)
        process.stdin, process.stdout = os.fdopen(pipes[0][1], "w"), os.fdopen(pipes[1][0])
        process.open += [process.stdin, process.stdout]
        return process

    def run(self, *arguments, env, cwd=None, timeout=600, **others):
        """Run a fork to its end, like `subprocess.run` with `capture_output` and `text`."""
        with self.start_captured(*arguments, env=env, cwd=cwd, **others) as process:
            out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def start_executor(self, config, report, lock, without, fork_server):
        """Start an executor with the requested streams, instead of `_spawn` of `djinn_server.launch.process`."""
        if config.module != EXECUTOR_MODULE or fork_server is not None:
            return START_EXECUTOR(config, report, lock, without, fork_server)
        folder = None
        with contextlib.suppress(FileNotFoundError):
            folder = Path.cwd()
        command = executor_command(config.module, config.device, report)
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb", 0) as given, os.fdopen(os.dup(2), "wb", 0) as said:
            streams = {"stdin": given, "stderr": said, "pass_fds": (report, lock)}
            started = self.start(*command[1:], env=executor_environment(without), cwd=folder, group=True, **streams)
        started.stdin = os.fdopen(writing, "wb", 0)
        return started

    def write_executable(self, file, command=()):
        """Write an executable that forks `python *command` with its arguments."""
        self.begin()
        shared = str(Path(__file__).parent)
        filled = FORKING.format(python=sys.executable, shared=shared, address=self.address, command=list(command))
        file.write_text(filled)
        file.chmod(0o755)


START_EXECUTOR = executor_process._spawn


class PreparedPython(Forks):
    """The process that is forked. It starts with the first fork. It ends at `close` or with its parent."""

    def __init__(self, environment):
        self._folder = tempfile.TemporaryDirectory(prefix="djinn-prepared-")
        super().__init__(str(Path(self._folder.name, "python")))
        self._environment = {**environment, "XDG_CACHE_HOME": self._folder.name}
        self._process, self._starting = None, threading.Lock()

    def begin(self):
        """Start the process if it has not started."""
        with self._starting:
            if self._process is None:
                self._process = subprocess.Popen(
                    # `djinn.testing` knows executors, which are forks, by the last word.
                    [sys.executable, __file__, self.address, "djinn"],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )

    def close(self):
        if self._process is not None:
            self._process.terminate()
            self._process.wait(SECONDS)
        self._folder.cleanup()


class StartedPython(ForkedExecutor):
    """A forked process, with those members of `subprocess.Popen` that tests use."""

    def __init__(self, args, server):
        self.args, self.open = args, []
        select.select([server], [], [], SECONDS)  # the prepared process may import still
        weakref.finalize(self, server.close)
        super().__init__(server, None)

    @property
    def returncode(self):
        return self.poll()

    def communicate(self, timeout=None):
        self.wait(timeout)
        said = []
        for file in self.open:
            file.seek(0)
            said.append(file.read())
        return tuple(said)

    def send_signal(self, number):
        self._send(number)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        self.wait()
        for file in self.open:
            with contextlib.suppress(BrokenPipeError):
                file.close()


# --- in the process that is forked, and in its forks -----------------------------------------------------------------


def import_all():
    """Import what forks need."""
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


def use_huge_pages():
    """Use huge pages for the heap if possible. A fork and its end then take a third of the time."""
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
    """Import Djinn and its plugins like a server, without the device. Forks that `import djinn` register the device."""
    from djinn_core.system import role

    role.become_server("gateway")
    importlib.import_module("djinn")
    for package in ("djinn_core", "djinn_client", "djinn_server"):
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    # What forks find in the memo tables of pure functions: the ops that travel, what is installed, what hooks must be like.
    from djinn_core.ir.operators import operators_digest
    from djinn_core.registry.builtin_plugins import builtin_plugins
    from djinn_core.registry.discovery import plugins_by_library
    from djinn_core.registry.registry import load_registry
    from djinn_core.registry.selection import Selection

    operators_digest()
    plugins_by_library()
    load_registry(Selection(), builtins=builtin_plugins())
    role._role = "client"
    device = sys.modules.pop("djinn")
    sys.meta_path.insert(0, ImportedBefore({"djinn": device}, lambda: device.__spec__.loader.exec_module(device)))


def import_transformers():
    """Import the modules of `import transformers`, which takes a second, for forks that need them."""
    try:
        importlib.import_module("transformers.models")
    except ImportError:
        return
    names = [name for name in sys.modules if name.partition(".")[0] == "transformers"]
    sys.meta_path.insert(0, ImportedBefore({name: sys.modules.pop(name) for name in names}))


class ImportedBefore:
    """A finder for modules that were imported before the fork and are hidden until the fork imports them."""

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


def prepared_server(address):
    """Serve forks of this process. An order says whether the fork runs a program, a server or an executor."""
    from djinn_launchers.fork_server import ForkServer

    class Prepared(ForkServer):
        def _become(self, order, given):
            numbers = [0, 1, 2, *order["descriptors"]]
            high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for number in given]
            for number in given:
                os.close(number)
            for number, held in zip(numbers, high, strict=True):
                os.dup2(held, number)
                os.close(held)
            if order.get("group"):
                os.setpgid(0, 0)
            executor_process._spawn = Forks(address).start_executor
            return order

    return Prepared(Path(address), seconds=86_400.0)


def become(order):
    """Run `python *arguments` in this fork."""
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
    """Run the order to its end. Return the exit status that `python` would have."""
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
    """End like an interpreter, without freeing modules and kernels, which would copy shared memory."""
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
    """Keep the registrations of kernel libraries, whose removal visits all dispatcher tables."""
    for finalizer in list(weakref.finalize._registry):
        found = finalizer.peek()
        if found is not None and getattr(found[1], "__name__", "") == "_del_library":
            finalizer.atexit = False


if __name__ == "__main__":
    with contextlib.suppress(AttributeError):  # where macOS is simulated
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    this = sys.modules["__main__"]  # stays while its own functions run
    server = prepared_server(sys.argv[1])
    import_all()
    taken = server.serve()
    leave(end_of(taken), taken.get("finalize"))
