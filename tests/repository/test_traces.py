"""The repository names no machine, no person and no registry: it must work wherever it is cloned."""

from __future__ import annotations

import ast
import re

# Written in pieces, so that this file does not find itself.
TRACES = {
    "a path of one machine": re.compile("/" + r"(?:work|root|home/\w+|Users/\w+)/"),
    "a registry's host": re.compile(
        r"(?i)\b(?:" + "|".join(("py" + r"pi\.org", "python" + r"hosted\.org", "download\\.py" + r"torch\.org")) + ")"
    ),
    "a private key": re.compile("BEGIN " + r"(?:RSA |EC |OPENSSH )?PRIVATE KEY"),
}


def test_no_machine_person_or_registry_is_named(root, files):
    found = []
    for path in files:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(root)} has {what}: {m[0]}" for what, p in TRACES.items() for m in p.finditer(text)
        ]
    assert not found


# What makes objects or code of bytes, and what finds code by name.
UNPICKLING = {"dill", "cloudpickle", "joblib", "shelve", "jsonpickle", "yaml", "marshal"}
MAKING_OBJECTS = {
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "marshal.load",
        "marshal.loads",
        "torch.load",
        "torch.jit.load",
    ),
    *("torch.hub.load", "torch.package.PackageImporter", "np.load", "numpy.load", "eval", "exec", "__import__"),
}
FINDING_CODE = {"importlib.import_module", "import_module", "pkgutil.resolve_name", "ctypes.CDLL", "runpy.run_path"}
# On the way of what arrives: modules that these name are constants, or chosen by the server's operator.
SHIPPED = {"djinn", "djinn_core", "djinn_client", "djinn_server", "plugins"}
RECEIVING = ("djinn_core/wire/", "djinn_core/protocol/", "djinn_client/runtime/", "djinn_server/")
KNOWN = {
    "plugins/strategies/djinn_strategies/compiling/compile_worker.py",  # in a process of its own: the compiler's entry, which the server's operator chose
    "djinn_server/custom_operators.py",  # modules that the server's operator chose
    "plugins/launchers/djinn_launchers/fork_server.py",  # two modules by names that are written there, late: they take long
    "djinn_server/malloc_trim.py",  # the C library of this process
    "djinn_server/system/memory.py",  # the same
    "djinn_server/system/confinement.py",  # the same, and pyseccomp
    "djinn_server/launch/embedded.py",  # the executor inside this process, by a name that is written there
    "djinn_core/wire/compression.py",  # zstandard
    "plugins/profiler/djinn_profiler/semantics.py",  # ops of a program of this process
    "djinn_server/memory/limited.py",  # modules of PyTorch, by names that are written there
}


SUSPICIOUS = re.compile(
    "|".join(re.escape(name) for name in (*(MAKING_OBJECTS - {"eval", "exec"}), *FINDING_CODE, *UNPICKLING))
    + r"|allow_pickle|from pickle|\b(?:eval|exec)\(|getattr\(torch"
)


def shipped(root, sources):
    """Places and trees of files that can have one of these: most have none, and parsing takes long."""
    for path in sources:
        place = path.relative_to(root)
        if place.parts[0] not in SHIPPED or "tests" in place.parts:
            continue
        text = path.read_text()
        if SUSPICIOUS.search(text):
            yield place.as_posix(), ast.parse(text)


def calls(tree):
    """Names of what a file calls, such as `torch.load`, and the calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_unpickling(root, sources):
    guilty = []
    for place, tree in shipped(root, sources):
        guilty += [f"{place} calls {name}" for name, _ in calls(tree) if name in MAKING_OBJECTS]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                guilty += [f"{place} imports {name}" for name in names if name.partition(".")[0] in UNPICKLING]
                if "pickle" in names and {"load", "loads", "Unpickler"} & set(names):
                    guilty.append(f"{place} imports what unpickles")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                guilty.append(f"{place} allows pickle")
    assert not guilty


def test_no_getattr_of_received_names(root, sources):
    guilty = []
    for place, tree in shipped(root, sources):
        if not place.startswith(RECEIVING) or place in KNOWN:
            continue
        for name, call in calls(tree):
            if name in FINDING_CODE:
                guilty.append(f"{place} calls {name}")
            if name == "getattr" and ast.unparse(call.args[0]).partition(".")[0] == "torch":
                guilty.append(f"{place} looks up {ast.unparse(call)}")
    assert not guilty
