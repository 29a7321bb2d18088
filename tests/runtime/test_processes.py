"""Programs of their own: how they fork, how they end, and what collections do in between."""

from __future__ import annotations

import concurrent.futures
import hashlib
import sys
import threading

import pytest

from djinn_client.interception import interpreter_shutdown

pytestmark = pytest.mark.usefixtures("fresh_processes")

PRELUDE = """\
import atexit, gc, multiprocessing, os, sys, threading, time
import torch, djinn
from torch.utils.data import DataLoader, TensorDataset
x = torch.ones(3, device="remote_accelerator")
"""

FORKS = """\
x.add_(1)
assert x.sum().item() == 6
y = x * 2  # unsent when the process forks

def child():
    assert not djinn.compat.is_initialized()
    try:
        (y + 1).tolist()
    except djinn.errors.SessionLost as error:
        assert "forked" in str(error) and "spawn" in str(error), error
    else:
        raise AssertionError("the child used its parent's session")
    try:
        djinn.init()
    except djinn.errors.SessionLost:
        return
    raise AssertionError("the child began a session")

number = os.fork()
if number == 0:
    child()
    sys.exit(7)  # with everything that runs at exit
assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 7

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(300)
assert process.exitcode == 0

loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2, multiprocessing_context="fork")
batches = [batch.to("remote_accelerator") for (batch,) in loader]
assert torch.cat(batches).tolist() == list(range(8))
assert y.tolist() == [4, 4, 4]
print("went on")

from djinn_server.launch.process import ExecutorProcess
from djinn_server.launch.orders import Drain
send, sent = ExecutorProcess.send, []
ExecutorProcess.send = lambda executor, order: (sent.append(order), send(executor, order))
djinn.shut_down()
assert sent == [Drain(0.0)], sent  # an end that waits for nothing, such as after Ctrl-C
"""

# Uses of the device before a fork, and whether the child may then use the device.
FORKS_EARLY = """\
x.tolist()
djinn.shut_down()  # from here on nothing is unsent, and there is no session
from torch.utils.data import Dataset

device = "remote_accelerator"

def in_child(report):
    reader, writer = os.pipe()
    if (number := os.fork()) == 0:
        try:
            os.write(writer, report().encode())
        except Exception as error:
            os.write(writer, type(error).__name__.encode())
        os._exit(0)
    os.waitpid(number, 0)
    return os.read(reader, 100).decode()

def forked():
    return in_child(lambda: str((torch.ones(2, device=device) + 1).tolist()))

def after(use):
    \"\"\"Return the result of the first op in a child whose parent only called `use`.\"\"\"
    return in_child(lambda: (use(), forked())[1])

def in_capture():
    with djinn.capture():
        torch.ones(2, device=device)
        return forked()

def in_a_thread():
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(2, device=device)))
    thread.start()
    thread.join()
    return made

assert after(lambda: (torch.manual_seed(0), torch.remote_accelerator.is_available())) == "[2.0, 2.0]"
for use in (
    lambda: djinn.init(),
    lambda: torch.zeros(1, device=device),
    lambda: torch.empty(1, device=device),
    lambda: torch.arange(8.0).to(device),
    lambda: torch.nn.Linear(1, 1).to(device),
    lambda: torch.ones(1, device=device).dim(),  # the tensor is gone
    in_a_thread,
):
    assert after(use) == "ForkedProcess", use
assert in_child(in_capture) == "ForkedProcess"

class Rows(Dataset):
    def __init__(self, table):
        self.table = table

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.table[index]

def loaded(table, **options):
    gc.collect()  # a worker that collects the loader of an error warns, on every device
    try:
        return [batch.tolist() for batch in DataLoader(Rows(table), num_workers=2, multiprocessing_context="fork", **options)]
    except Exception as error:
        return type(error).__name__

table = torch.arange(8.0, device=device)
assert loaded(table, batch_size=4) == "ForkedProcess"
assert loaded([table] * 8, batch_size=None) == "UnsupportedOperation"  # no op: what a worker hands over is refused where it arrives
assert loaded(torch.arange(8.0), batch_size=4) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
assert table.tolist() == list(range(8))
print("each as documented")
"""

ENDS_INSIDE_A_CAPTURE_WITH_LIVE_TENSORS = """\
class Late:
    def __init__(self):
        self.tensor, self.me = x * 3, self

    def __del__(self):
        deleted.append(self.tensor.shape)

deleted = []
late, kept = Late(), [x * i for i in range(50)]
x.sum().item()
with djinn.capture():
    kept = torch.ones(3) + 1
    sys.exit(4)
"""

# The second thread is in an op, the third imports what an op needs, the fourth waits for a lock, the fifth is in a backward pass, the sixth
# waits for nothing.
ENDS_WITH_DAEMON_THREADS = """\
def work():
    y = x
    while True:
        y = y * 1.01
        y.sum().item()

def record():
    y = x
    while True:
        y = y * 1.01

def stack():
    while True:
        torch.linalg.norm(x).item()

def differentiate():
    w = torch.ones(3, device="remote_accelerator", requires_grad=True)
    while True:
        (w * x).sum().backward()

x.sum().item()
for function in (work, stack, work, differentiate, record):
    threading.Thread(target=function, daemon=True).start()
time.sleep(0.2)
print("end")
"""

COLLECTS = """\
djinn.configure(checkpoint_instructions=64, threads=1)
asked = []

class Cycle:
    '''Uses its tensor when it is collected: records, asks for elements, uploads.'''

    def __init__(self, tensor):
        self.tensor, self.me = tensor, self

    def __del__(self):
        self.tensor.add_(1)
        total = (self.tensor + torch.ones(2).to(self.tensor.device)).sum()
        if len(asked) % 5 == 0:
            asked.append(total.item())
        else:
            asked.append(total)

def work(number):
    total = torch.zeros(2, device="remote_accelerator")
    for i in range(60):
        Cycle(torch.full((2,), float(number), device="remote_accelerator"))
        total += torch.ones(2).to("remote_accelerator")
        if i % 7 == 0:
            total.sum().item()
    results[number] = total.tolist()

results = {}
work(0)
gc.set_threshold(1, 1, 1)
work(1)
threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
gc.set_threshold(700)
gc.collect()
assert gc.isenabled()
assert results == {n: [60, 60] for n in range(4)}, results
assert len(asked) == 240, len(asked)
assert {float(a) for a in asked} == {2.0 * (n + 2) for n in range(4)}
print("done")
"""

BEGINS_IN_A_HUNDRED_THREADS = """\
begun = []
djinn.compat.register_init_hook(lambda: begun.append(torch.ones(1, device="remote_accelerator").item()))
start, results = threading.Barrier(100), []

def use():
    start.wait()
    results.append(torch.ones(2, device="remote_accelerator").sum().item())

threads = [threading.Thread(target=use) for _ in range(100)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [2.0] * 100, results
djinn.compat.register_init_hook(lambda: begun.append("late"))  # at once, since a session is open
assert begun == [1.0, "late"], begun
print("once")

from djinn_client.runtime import attaching

def late():
    try:
        (x + 1).tolist()
    except djinn.errors.SessionLost as error:
        print("late:", error)

atexit.unregister(attaching._at_exit)
atexit.register(late)
atexit.register(attaching._at_exit)  # the last that is registered runs first
"""

# Each call waits for the executor with the lock of a generator, or wants that lock.
USES_GENERATORS_IN_THREADS = """\
device = "remote_accelerator"
shared = torch.Generator(device)

def use():
    for seed in range(10):
        torch.manual_seed(seed)
        torch.remote_accelerator.get_rng_state()
        shared.manual_seed(seed)
        shared.set_state(shared.get_state())
        shared.clone_state().seed()
        torch.rand(3, device=device, generator=shared).tolist()

threads = [threading.Thread(target=use) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
torch.manual_seed(1)
shared.manual_seed(1)
drawn = torch.rand(3, device=device), torch.rand(3, device=device, generator=shared)
torch.manual_seed(1)
assert drawn[0].tolist() == torch.rand(3, device=device).tolist()
assert drawn[1].tolist() == torch.rand(3, device=device, generator=shared.manual_seed(1)).tolist()
print("drawn")
"""

SCRIPTS = {name: script for name, script in list(globals().items()) if isinstance(script, str) and name.isupper()}


@pytest.fixture(scope="module")
def programs(python, plain_environment):
    """Run the scripts, two at a time. Return the output, errors and exit status of each."""

    def run(script):
        return python.run("-W", "error", "-c", PRELUDE + script, env=plain_environment, finalize=True)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, script) for name, script in SCRIPTS.items() if name != "PRELUDE"}


@pytest.mark.parametrize(
    ("program", "status", "printed"),
    [
        ("FORKS", 0, "went on\n"),
        ("FORKS_EARLY", 0, "each as documented\n"),
        ("ENDS_INSIDE_A_CAPTURE_WITH_LIVE_TENSORS", 4, ""),
        ("ENDS_WITH_DAEMON_THREADS", 0, "end\n"),
        ("COLLECTS", 0, "done\n"),
        ("USES_GENERATORS_IN_THREADS", 0, "drawn\n"),
        ("BEGINS_IN_A_HUNDRED_THREADS", 0, "once\nlate: the session has ended, because the program is ending"),
    ],
)
def test_program_ends_quietly(programs, program, status, printed):
    done = programs[program].result()
    assert (done.returncode, done.stderr) == (status, ""), done.stdout
    assert done.stdout.startswith(printed)


FORKS_BESIDE_AN_IMPORT = """\
import os, sys, threading, time
from djinn_core.system.processes import NoFork
no_fork, begun, done = NoFork(longest=200), threading.Event(), []
no_fork.register()

def load():
    with no_fork:
        begun.set()
        time.sleep(0.3)
        done.append("imported")

thread = threading.Thread(target=load)
thread.start()
begun.wait()
if (child := os.fork()) == 0:
    with no_fork:  # neither the parent's thread nor the fork is inside any more
        os._exit(3 if done else 4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
with no_fork:  # the thread that forks may itself be inside
    if (child := os.fork()) == 0:
        os._exit(0)
os.waitpid(child, 0)
print(done)
"""


def test_fork_waits_for_importing_thread(python, plain_environment):
    done = python.run("-c", FORKS_BESIDE_AN_IMPORT, env=plain_environment)
    assert (done.returncode, done.stdout) == (0, "['imported']\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing says whether a thread runs")
def test_exit_waits_for_thread_between_ops(monkeypatch):
    monkeypatch.setattr(interpreter_shutdown, "_RUNNING_SECONDS", 60.0)
    begun, done, end = threading.Event(), [], threading.Event()

    def work():
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # without the GIL, as C++ between two ops
        done.append(True)
        end.wait(60)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(60)
    interpreter_shutdown.await_threads()
    assert done
    end.set()
    thread.join(60)
