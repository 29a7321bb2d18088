"""Conformance suite for operator libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.hookspecs.operators import CastPolicy, OperatorLibrary
from djinn_core.ir.operators import LAYOUT_CALL, resolve
from djinn_core.torch_private import schema_of
from djinn_server.custom_operators import CustomOperators

Calls = Mapping[str, Sequence[tuple[Any, ...]]]


class OperatorLibraryConformance(Ending):
    """Tests that every operator library must pass.

    Subclass this class and define the fixtures `library` and `calls`. `calls` maps each op of the library to a list of
    argument tuples with CPU tensors. The module of the library must be importable.
    """

    @pytest.fixture
    def library(self) -> OperatorLibrary:
        """Return the operator library under test."""
        return missing(self, "library", "your operator library")  # type: ignore[return-value]

    @pytest.fixture
    def calls(self) -> Calls:
        """Return argument tuples for each op, by name of the op."""
        return missing(self, "calls", "arguments for each op, by name")  # type: ignore[return-value]

    @pytest.fixture(autouse=True)
    def _allowed(self, library: OperatorLibrary) -> None:
        """Allow the library as a server does.

        Its module must register each op, and arguments and results must be sendable.
        """
        operators = CustomOperators([f"{library.name}@suite"], [library])
        operators.assign("suite")
        assert {operator.name for operator in operators.offered} == library.operators

    def test_operator_library_has_every_member(self, library: OperatorLibrary) -> None:
        """The library has all attributes and methods of `OperatorLibrary`, and names only ops that it offers."""
        require_protocol(library, "operators")
        assert library.operators or library.implementation(LAYOUT_CALL), "the library offers no op"
        assert library.data_dependent <= library.operators, "`data_dependent` names ops that the library does not offer"
        for op in library.operators:
            assert isinstance(library.cast_policy(op), CastPolicy | None)

    def test_predicted_metadata_match_results(self, library: OperatorLibrary, calls: Calls) -> None:
        """Predicted shapes, strides and dtypes equal those of the CPU kernels' results."""
        assert calls.keys() == library.operators, "`calls` must contain each op of the library"
        for op, arguments in calls.items():
            infer = library.metadata(op) or resolve(op)
            for argument_list in arguments:
                results = resolve(op)(*_copied(argument_list, "cpu"))
                if op in library.data_dependent:
                    continue
                assert _properties_of(infer(*_copied(argument_list, "meta"))) == _properties_of(results), (
                    f"{op}: the predicted metadata differ from the results"
                )

    def test_check_accepts_valid_arguments(self, library: OperatorLibrary, calls: Calls) -> None:
        """`check` accepts the arguments of all calls, and does not change them."""
        for op, arguments in calls.items():
            names = [argument.name for argument in schema_of(resolve(op)).arguments]
            for argument_list in arguments:
                before = _copied(argument_list, "cpu")
                library.check(op, dict(zip(names, argument_list, strict=False)))
                for value, value_before in zip(
                    pytree.tree_leaves(argument_list), pytree.tree_leaves(before), strict=True
                ):
                    if isinstance(value, torch.Tensor):
                        torch.testing.assert_close(value, value_before, rtol=0, atol=0, equal_nan=True)


def _copied(arguments: Any, device: str) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.detach().to(device, copy=True), arguments)


def _properties_of(results: Any) -> list[Any]:
    leaves = pytree.tree_leaves(results)
    return [(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
