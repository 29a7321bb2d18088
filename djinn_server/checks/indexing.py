"""Rules for ops whose tensors hold indices, lengths or offsets that their kernels use without bounds checks."""

from __future__ import annotations

import torch

from djinn_server.checks.arguments import Arguments

_MEAN, _MAX = 1, 2  # modes of embedding bags


def embedding_backward(a: Arguments) -> None:
    """Check that each index has a gradient. With `scale_grad_by_freq`, check that indices are existing rows."""
    gradient = a.grad_output if a.grad_output is not None else a.grad
    a.require(
        gradient.dim() > 0 and gradient.numel() == a.indices.numel() * gradient.shape[-1],
        "the gradient must have one row for each of the indices",
    )
    a.require(a.num_weights >= 0, "num_weights must not be negative")
    a.integral("indices", a.indices)
    if a.scale_grad_by_freq:
        a.within("indices", a.num_weights)


def bag(a: Arguments) -> None:
    """Check the backward pass of an embedding bag: indices are existing rows, and each index is in an existing bag."""
    rows = a.num_weights if a.num_weights is not None else a.weight.shape[0]
    a.require(a.grad.dim() == 2 and a.indices.dim() == 1, "grad must have two dimensions, and indices one")
    a.require(
        a.weight is None or (a.weight.dim() == 2 and a.weight.shape[1] == a.grad.shape[1]),
        "weight must have two dimensions and the columns of grad",
    )
    a.require(not a.sparse, "sparse gradients are not supported: use `sparse=False`")
    a.within("indices", rows)
    bags = a.grad.shape[0]
    if a.offsets is not None:
        _offsets(a, bags)
    if a.offset2bag.numel() or a.offsets is None:
        a.count("offset2bag", a.indices.numel())
        a.within("offset2bag", bags)
    a.count("per_sample_weights", a.indices.numel())
    for name in ("bag_size", "maximum_indices"):
        if a.__getattr__(name) is not None:
            a.integral(name, a.__getattr__(name))
    if a.mode == _MEAN and a.bag_size is not None:
        a.count("bag_size", bags)
    if a.mode == _MAX and a.maximum_indices is not None:
        a.require(a.maximum_indices.shape == a.grad.shape, "maximum_indices must be shaped like grad")
        a.within("maximum_indices", rows, start=-1)


def bag_forward(a: Arguments) -> None:
    """Check that indices are existing rows, and that offsets split the indices into bags."""
    a.require(a.weight.dim() == 2, "weight must have two dimensions")
    a.require(a.indices.dim() == 1 and a.offsets.dim() == 1, "indices and offsets must have one dimension")
    a.within("indices", a.weight.shape[0])
    a.count("per_sample_weights", a.indices.numel())
    _ascending(a)


def _offsets(a: Arguments, bags: int) -> None:
    fits = a.offsets.dim() == 1 and a.offsets.numel() in {bags, bags + 1}
    a.require(fits, f"offsets must have one dimension, and {bags} or {bags + 1} elements")
    _ascending(a)
    if a.offsets.device.type == "cpu" and a.offsets.numel() == bags + 1:
        a.require(int(a.offsets[-1]) == a.indices.numel(), "the last offset must be the number of indices")


def _ascending(a: Arguments) -> None:
    a.within("offsets", a.indices.numel() + 1)
    if a.offsets.device.type == "cpu" and a.offsets.numel():
        a.require(int(a.offsets[0]) == 0 and bool((a.offsets.diff() >= 0).all()), "offsets must ascend from 0")


def negative_log_likelihood(a: Arguments) -> None:
    """Check that targets are existing classes."""
    scores, target = a.self, a.target
    class_dim = 1 if scores.dim() > 1 else 0
    a.require(
        scores.dim() > 0 and tuple(target.shape) == (*scores.shape[:class_dim], *scores.shape[class_dim + 1 :]),
        "target must have the shape of self without the dimension of classes",
    )
    classes = scores.shape[class_dim]
    a.require(target.dtype in {torch.int64, torch.uint8}, "target must be int64 or uint8")
    a.elements_within("target", target.long(), classes, ignored=a.ignore_index)
    a.count("weight", classes)
    a.count("total_weight", 1)
    expected = tuple(target.shape) if a.reduction == 0 else ()
    fits = tuple(a.grad_output.shape) == expected or (a.reduction != 0 and a.grad_output.numel() == 1)
    a.require(fits, f"grad_output must have shape {expected}")


def ctc(a: Arguments) -> None:
    """Check that lengths are within the sequences, and targets are existing classes."""
    steps, batch, classes = _sequences(a)
    lengths = _counts(a, "input_lengths", batch)
    target_lengths = _counts(a, "target_lengths", batch)
    if lengths is None or target_lengths is None:
        return
    a.require(max(lengths, default=0) <= steps, f"input_lengths must be at most {steps}")
    a.require(0 <= a.blank < classes, f"blank must be from 0 to {classes - 1}")
    targets = a.targets
    a.integral("targets", targets)
    if targets.dim() == 1:
        a.require(sum(target_lengths) <= targets.numel(), "target_lengths must not exceed targets")
        a.elements_within("targets", targets[: sum(target_lengths)], classes)
    else:
        a.require(targets.dim() == 2 and targets.shape[0] == batch, f"targets must have {batch} rows")
        a.require(max(target_lengths, default=0) <= targets.shape[1], "target_lengths must not exceed targets")
        for row, length in zip(targets, target_lengths, strict=True):
            a.elements_within("targets", row[:length], classes)
    if a.log_alpha is not None:
        shape = a.log_alpha.shape
        fits = len(shape) == 3 and shape[0] == batch and shape[1] >= max(lengths, default=0)
        a.require(fits and shape[2] >= 2 * max(target_lengths, default=0) + 1, "log_alpha is too small for the lengths")
        a.require(a.log_alpha.dtype == a.log_probs.dtype, "log_alpha must have the dtype of log_probs")
        a.count("grad", batch)
        a.count("neg_log_likelihood", batch)


def _sequences(a: Arguments) -> tuple[int, int, int]:
    shape = tuple(a.log_probs.shape)
    a.require(len(shape) == 3, "log_probs must have three dimensions")
    return shape[0], shape[1], shape[2]


def _counts(a: Arguments, name: str, batch: int) -> list[int] | None:
    """Check and return `batch` lengths in a tensor or list. Return None, unchecked, if the tensor is not on the CPU."""
    lengths = a.__getattr__(name)
    if isinstance(lengths, torch.Tensor):
        if lengths.device.type != "cpu":
            return None
        a.integral(name, lengths)
        a.require(lengths.dim() == 1, f"{name} must have one dimension")
        lengths = lengths.tolist()
    a.require(len(lengths) == batch and min(lengths, default=0) >= 0, f"{name} must be {batch} numbers, none negative")
    return list(lengths)


def segments(a: Arguments) -> None:
    """Check that lengths or offsets split the data into segments within its bounds."""
    data, axis = a.data, a.axis or 0
    a.require(-data.dim() <= axis < data.dim(), "axis must be a dimension of data")
    axis %= data.dim()
    cuts = a.lengths if a.lengths is not None else a.offsets
    name = "lengths" if a.lengths is not None else "offsets"
    a.require(cuts is not None, "lengths and offsets are missing: one of them is needed")
    fits = cuts.dim() == axis + 1 and cuts.shape[:axis] == data.shape[:axis]
    a.require(fits, f"{name} must have {axis + 1} dimensions, and the sizes of data before axis")
    a.within(name, data.shape[axis] + 1)
    pieces = cuts.shape[axis] - (name == "offsets")
    if cuts.device.type == "cpu" and cuts.numel():
        if name == "lengths":
            # The kernel checks that the segments cover all of `data`, unless `unsafe` is set.
            a.require(
                bool((cuts.sum(-1) <= data.shape[axis]).all()), "lengths must not sum to more than the size of data"
            )
        else:
            a.require(bool((cuts.diff(dim=-1) >= 0).all()), "offsets must ascend")
    a.require(pieces >= 0, "offsets must not be empty")
    if a.grad is not None:
        expected = (*data.shape[:axis], pieces, *data.shape[axis + 1 :])
        a.require(
            tuple(a.grad.shape) == tuple(a.output.shape) == expected, f"grad and output must have shape {expected}"
        )
        a.require(a.grad.dtype == a.output.dtype == data.dtype, "grad and output must have the dtype of data")


def lu_pivots(a: Arguments) -> None:
    """Check that pivots are rows of the matrix, counted from 1."""
    matrix, pivots = a.LU_data, a.LU_pivots
    a.require(matrix.dim() >= 2 and pivots.dim() == matrix.dim() - 1, "LU_pivots needs one dimension less than LU_data")
    a.require(tuple(pivots.shape[:-1]) == tuple(matrix.shape[:-2]), "LU_pivots must have the batch sizes of LU_data")
    a.count("LU_pivots", pivots.shape[:-1].numel() * min(matrix.shape[-2:]))
    a.require(pivots.dtype == torch.int32, "LU_pivots must be int32")
    a.within("LU_pivots", matrix.shape[-2] + 1, start=1)


def masked_index(a: Arguments) -> None:
    """Check that `indices` has at most one index for each dimension of the tensor."""
    count = a.self.dim()
    a.require(len(a.indices) <= count, f"{len(a.indices)} indices are too many for a tensor of {count} dimensions")
