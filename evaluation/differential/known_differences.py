"""Known differences of the remote device from the CPU, with reasons. A run reports unused entries."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import attrs


@attrs.frozen
class KnownDifference:
    """A kind of difference, with the reason to accept it.

    Attributes:
        property: name of the differing property.
        place, source, here, there: regular expressions for the tensor's name, the statement, and both properties.
        after_error: True if the statement must have raised on both sides.
        ends: True if the rest of the program cannot be compared.
    """

    name: str
    property: str
    reason: str
    place: str = ""
    source: str = ""
    here: str = ""
    there: str = ""
    after_error: bool = False
    ends: bool = False


KNOWN: tuple[KnownDifference, ...] = (
    KnownDifference(
        "results of ops of databases",
        "version",
        "How often a kernel writes into its own result, or into `out=`, is no promise.",
        place="^(result|inputs|out)",
        source="^result = call|result = call.*out=",
    ),
    KnownDifference(
        "dropout",
        "grad_fn",
        "The CPU multiplies by a mask; PyTorch takes native_dropout for all other devices.",
        here="MulBackward0",
        there="NativeDropoutBackward0",
    ),
    KnownDifference(
        "gradients made in place",
        "version",
        "Formulas of gradients write into zeros. The CPU's `zeros` writes in place, too; the device records `zeros` whole.",
        source=r"autograd\.|\.grad\b|backward\(|^gradients = ",
    ),
    KnownDifference(
        "steps of size 1",
        "idle stride",
        "PyTorch's meta kernels in Python compute other strides than its CPU kernels for dimensions of size 1 and tensors without"
        " elements. No element is addressed by them.",
    ),
    KnownDifference(
        "name of the tensor type in version errors",
        "error text",
        "PyTorch makes it of the dispatch key.",
        there="cpuFloatType|cpuDoubleType|cpuHalfType|cpu\\w+Type",
        here="torch\\.\\w+Tensor",
    ),
    KnownDifference(
        "results of composite ops",
        "version",
        "The CPU's own implementation of these ops writes in place into its result; the device records them whole.",
        source=r"one_hot|F\.linear|trapezoid",
    ),
    KnownDifference(
        "out= of a refused op",
        "(idle )?stride|shape|version",
        "The CPU resizes the tensor before it refuses the op.",
        source="out=",
        after_error=True,
        ends=True,
    ),
    KnownDifference(
        "errors that depend on data",
        "error",
        "docs/limits.md: an error that depends on data is raised at the next sync point.",
        here="out of bounds|out of range|probability tensor contains|invalid Poisson rate|is not finite",
        there=r"^\(nothing\)$",
        ends=True,
    ),
    KnownDifference(
        "dtypes without a kernel",
        "error",
        "docs/limits.md: dtypes that neither the meta kernel nor a trial refuses are refused at the next sync point.",
        here="not implemented for|not supported for|expected m1 and m2 to have the same dtype",
        there=r"^\(nothing\)$",
        ends=True,
    ),
    KnownDifference(
        "refused ops of databases",
        "error",
        "docs/limits.md: what neither the meta kernel nor a trial refuses is refused at the next sync point.",
        source=r"result = call",
        there=r"^\(nothing\)$",
        ends=True,
    ),
    KnownDifference(
        "texts of meta kernels",
        "error text",
        "PyTorch's meta kernels word errors otherwise than its CPU kernels.",
        source=r"result = call|clamp",
    ),
    KnownDifference(
        "warnings of experimental layouts",
        "warnings",
        "The client makes such tensors itself, or a trial does, so that the warning comes more or less often.",
        here="ComplexHalf|Sparse CSR",
    ),
    KnownDifference(
        "order of checks",
        "error text",
        "These kernels look at dimensions or dtypes before memory; the client looks at memory first.",
        source=r"torch\.(cat|index_select)\(",
        there="single memory location",
    ),
    KnownDifference(
        "order of checks of stack",
        "error",
        "As order of checks: `stack` looks at the dtype of `out=` before memory.",
        source=r"torch\.stack\(.*out=",
        here="can't be cast to the desired output type",
        there="single memory location",
        ends=True,
    ),
    KnownDifference(
        "batch norm of one dimension",
        "error",
        "The executor refuses it before the kernel does, because CUDA's kernels do not check it.",
        source=r"batch_norm\(",
        here="^IndexError: Dimension out of range",
        there="input must have channels",
    ),
    KnownDifference(
        "histc of integers",
        "error",
        "The CPU's kernel cannot widen the range of a tensor with equal elements at the end of its dtype; CUDA's can.",
        source=r"histc\(",
        here="without overflow",
        there=r"^\(nothing\)$",
        ends=True,
    ),
    KnownDifference(
        "internal ops for masks",
        "error",
        "PyTorch's meta kernel raises RuntimeError where the CPU's kernel raises IndexError; no public function calls these ops.",
        source="^result = call",
        here="^IndexError: too many indices",
        there="^RuntimeError: aten::_unsafe_masked_index",
    ),
    # --- warnings
    KnownDifference(
        "warnings of kernels",
        "warnings",
        "An op is executed elsewhere, and what its kernel warns of does not come back.",
        there=r"^\(nothing\)$",
    ),
    KnownDifference(
        "warnings of meta kernels",
        "warnings",
        "PyTorch's meta kernels in Python word the warning otherwise.",
        there="An output with one or more elements was resized|on expanded tensors is deprecated",
    ),
    KnownDifference(
        "numbers that are assigned",
        "grad_fn",
        "PyTorch fills CPU tensors with a number that is assigned, and copies it to tensors of other devices.",
        source=r"\] = ",
        here="FillBackward",
        there="CopyBackwards",
    ),
    KnownDifference(
        "isin of tensors by columns",
        "error",
        "The CPU's kernel fails to view its result; the executor's, which gets the tensors in one piece, does not.",
        source=r"isin\(",
        here="view size is not compatible",
        ends=True,
    ),
    KnownDifference(
        "views that steps of size 1 decide",
        "error|storage_offset",
        "As steps of size 1: no element is addressed by them, but `view(dtype)` and the offsets of empty parts are computed of them.",
        source=r"\.view\(torch|split\(|chunk\(|\[1:\]|narrow\(",
        here=r"stride\(-1\) must be 1|^\d+$",
        ends=True,
    ),
    KnownDifference(
        "reductions into their input",
        "error",
        "The CPU resizes the tensor first, and then fails to read it.",
        source=r"torch\.(sum|max|cumsum|clamp)\((\w+).*out=\2\b",
        here="size of tensor a",
        there=r"^\(nothing\)$",
        ends=True,
    ),
    KnownDifference(
        "writes to nothing",
        "error",
        "`cat` and `stack` refuse a target without elements that they read as well; nothing is written to it.",
        source=r"torch\.(cat|stack)\(\[(\w+), \2\], out=\2\)",
        here="single memory location",
        there=r"^\(nothing\)$",
        ends=True,
    ),
)

needed: Counter[str] = Counter()


def known_difference(found: Any, raised: bool) -> KnownDifference | None:
    """Return the first entry that matches a difference, or None. `raised`: True if the statement raised on both sides."""
    for entry in KNOWN:
        if (
            re.fullmatch(entry.property, found.property)
            and re.search(entry.place, found.place)
            and re.search(entry.source, found.source)
            and re.search(entry.here, str(found.here))
            and re.search(entry.there, str(found.there))
            and raised >= entry.after_error
        ):
            needed[entry.name] += 1
            return entry
    return None
