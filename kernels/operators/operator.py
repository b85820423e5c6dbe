"""The types of this folder's files: forms and sizes of an operator, its cases and checks, and its times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import LARGEST_CODE, CodeGrid
from heterollm.kernels.gpu import GlueKernels, Launch
from heterollm.kernels.operators.data import Data, Numbers, run_launches
from heterollm.kernels.ops import Group, Join, OpSpec, WeightFormat

StepCategory: TypeAlias = Literal["embedding", "norm", "attention", "activation", "join", "linear", "other"]
"""StepCategory of a step in traces."""

Codes: TypeAlias = Literal["", "int8", "uint8", "uint16"]
Values: TypeAlias = Mapping[str, NDArray[Any]]
Exact: TypeAlias = dict[str, NDArray[np.float64]]

GRIDS: Final[Mapping[Codes, CodeGrid]] = {
    "uint16": CodeGrid(1 / LARGEST_CODE, 1 / LARGEST_CODE, per_token=True),
    "uint8": CodeGrid(1 / 127, 1 / 127, per_token=False, bits=8),
}
"""Grids that are measured: nearly all linears on codes of 16 bits divide by a token's largest magnitude."""


class Launched(Protocol):
    """An operator at some sizes."""

    def launches(self, on: GlueKernels, data: Data) -> Iterable[Launch]:
        """Return or yield the launches in order."""


class OperatorCase(Launched, Protocol):
    """An operator at some sizes beside its oracle."""

    def exact(self, data: Values) -> Exact:
        """Return the exact outputs, by name, for the data that the launches were given."""


def check_case(case: OperatorCase, on: GlueKernels, generator: np.random.Generator) -> dict[str, Numbers]:
    """Run a case on random data; return each output with the exact one.

    Raises:
        KernelError: A kernel wrote outside of its outputs.
    """
    data = Data(on, generator)
    run_launches(on.runtime, case.launches(on, data))
    return {name: (data.read(name), own) for name, own in case.exact(data.values).items()}


@dataclass(frozen=True, slots=True)
class OperatorCheck:
    """A row of the doctor: an operator, its case in words, and the output of the case that counts."""

    operator: str
    title: str
    case: OperatorCase
    output: str


# -- times -------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """The ends of an operator: how segments of its input join, and the codes it writes beside floats."""

    join: Join = "concatenate"
    codes: Codes = ""

    def splits(self, *rows: int) -> tuple[int, ...]:
        """Return halves of all members; for a sum all rows, as the whole NPU with a shadow has them."""
        return rows if self.join == "sum" else tuple(row // 2 for row in rows)


class OperatorSizes(NamedTuple):
    """The sizes that an operator's time depends on, 0 for all others, as in keys of profiles.

    Args:
        tokens: Rows of the pass.
        context: Positions that the last token attends to, or channels that are multiplied.
        hidden: Width of the rows.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head.
    """

    tokens: int
    context: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0


class ModelSizes(Protocol):
    """The sizes of a model; see :class:`heterollm.model.ModelShape`."""

    @property
    def layer(self) -> tuple[OpSpec, ...]: ...
    @property
    def head(self) -> OpSpec: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class Point(NamedTuple):
    """A form of an operator at sizes to measure; ``capacity`` counts the positions of the KV cache."""

    model: ModelSizes
    form: Form
    sizes: OperatorSizes
    capacity: int

    def int8(self, group: Group) -> WeightFormat | None:
        """Return the number format of the group that reads int8 codes, if the operator writes them."""
        if self.form.codes != "int8":
            return None
        own = [spec for spec in (*self.model.layer, self.model.head) if spec.group == group]
        return next((spec for spec in own if spec.columns == self.sizes.hidden), own[0]).weight


class Scope(NamedTuple):
    """The sizes to measure.

    Args:
        tokens: Tokens of a pass.
        head_tokens: Rows of the head.
        positions: Tokens of the session before the pass.
        coded: Groups of the model that have integer graphs.
        sparse: Tokens and keys of passes with sparse attention, or with attention on the NPU.
        on_npu: Whether to measure attention on the NPU at these sizes.
    """

    tokens: tuple[int, ...]
    head_tokens: tuple[int, ...]
    positions: tuple[int, ...]
    coded: tuple[OpSpec, ...]
    sparse: tuple[tuple[int, int], ...]
    on_npu: bool = False

    @property
    def layer(self) -> tuple[OpSpec, ...]:
        """Groups of a layer on codes."""
        return tuple(spec for spec in self.coded if spec.group != "head")

    @property
    def has_shadows(self) -> bool:
        """Whether weights have one scale, so that ranges are static and linears may have shadows."""
        return any(spec.weight.scales == "tensor" for spec in self.layer)

    @property
    def codes(self) -> Form:
        """The form on the codes of a layer's linears."""
        return Form(codes="uint8" if self.has_shadows else "uint16")


Points: TypeAlias = "Callable[[Timed, ModelSizes, Scope], Iterable[tuple[Form, OperatorSizes]]]"


def every_pass(timed: Timed, model: ModelSizes, scope: Scope) -> Iterator[tuple[Form, OperatorSizes]]:
    """Yield all tokens of a pass, and the readers of a sum where linears may have shadows."""
    forms = [Form()] + [Form("sum")] * (scope.has_shadows and Form("sum") in timed.forms)
    for form, width in itertools.product(forms, timed.widths(model)):
        yield from ((form, timed.sizes(model, tokens, width=width)) for tokens in scope.tokens)


def head_rows(timed: Timed, model: ModelSizes, scope: Scope) -> Iterator[tuple[Form, OperatorSizes]]:
    """Yield the rows of the head, on codes too where it has integer graphs."""
    on_codes = Form(codes="uint16") in timed.forms and any(spec.group == "head" for spec in scope.coded)
    for form in [Form()] + [Form(codes="uint16")] * on_codes:
        yield from ((form, timed.sizes(model, tokens)) for tokens in scope.head_tokens)


def by_width(widths: Callable[[Scope], Iterable[int]], channels: Iterable[int] = (0,)) -> Points:
    """Return points of all tokens for each width of a layer's linears on codes."""

    def points(timed: Timed, model: ModelSizes, scope: Scope) -> Iterator[tuple[Form, OperatorSizes]]:
        form = Form() if Form() in timed.forms else scope.codes
        counts = sorted({min(count, model.hidden_size) for count in channels})
        for tokens, width, count in itertools.product(scope.tokens, sorted(set(widths(scope))), counts):
            yield form, timed.sizes(model, tokens, width=width, channels=count)

    return points


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """An operator that profiles have times of.

    Args:
        forms: Its forms with their names in profiles.
        case: Returns the case to measure.
        width: Returns the width of its rows; None where it is that of the inputs that it writes.
        has_heads: Whether its time depends on the heads.
        reads_cache: Whether it reads the keys and values of all positions.
        points: Yields the forms and sizes to measure.
    """

    forms: Mapping[Form, str]
    case: Callable[[Point], Launched]
    width: Callable[[ModelSizes], int] | None = None
    has_heads: bool = False
    reads_cache: bool = False
    points: Points = every_pass

    def sizes(
        self,
        model: ModelSizes,
        tokens: int,
        position: int = 0,
        *,
        width: int | None = None,
        channels: int = 0,
    ) -> OperatorSizes:
        """Return the sizes of a model's operator.

        Args:
            model: The model.
            tokens: Rows of the pass.
            position: Tokens of the session before it.
            width: Width of the rows; by default the widest of the model's.
            channels: Channels that are multiplied.
        """
        context = position + tokens if self.reads_cache else channels
        if self.has_heads:
            return OperatorSizes(tokens, context, 0, model.heads, model.kv_heads, model.head_dim)
        return OperatorSizes(tokens, context, max(self.widths(model)) if width is None else width)

    def widths(self, model: ModelSizes) -> tuple[int, ...]:
        """Return the distinct widths of its rows in a model; none where no group of a layer follows it."""
        if self.has_heads:
            return (0,)
        if self.width is not None:
            return (self.width(model),)
        name = self.forms[Form()]
        return tuple(dict.fromkeys(spec.columns for spec in model.layer if name in spec.before))

    def form(self, model: ModelSizes, form: Form) -> Form:
        """Return the form in a model: where linears read int8 inputs, the operator writes them if it can."""
        rounds = form._replace(codes="int8")
        return rounds if not form.codes and model.head.integer_inputs and rounds in self.forms else form
