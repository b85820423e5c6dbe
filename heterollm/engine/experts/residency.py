"""A memory budget of experts: slots for some of a model's experts, and the reading of others on demand.

All layers share the slots. Once a layer has routed its tokens, the host waits for the choice, which is one
wait a layer. It reads the chosen experts that no slot holds from the files of the weights, and gives each the
slot whose expert was used longest ago. A kernel then writes the slots of the chosen experts into the places
of the grouped products. A pass that may choose more experts than there are slots goes in rounds; rounds
without an expert compute nothing. Results do not depend on the budget, as rows of experts never mix.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CalibrationError, OptionError, Progress, format_bytes
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import DeviceMemory, ExpertShape, GroupedLinear, packed_bytes
from heterollm.kernels.ops import OpSpec
from heterollm.model import ExpertReader, ModelWeights
from heterollm.solver import ExpertsPlacement

GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class ExpertBudget:
    """The memory that a model's experts may take on the GPU, less than all of them need.

    Args:
        slots: Experts that it holds at once.
        size_bytes: Its size.
        first: Layer and number of the experts that it holds before the first pass.
    """

    slots: int
    size_bytes: int
    first: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """Counts of a budget of experts since the last reset.

    Args:
        slots: Experts that the memory holds at once.
        experts: Experts of all layers.
        resident_bytes: Memory of the slots.
        hits: Chosen experts that were in memory, once a layer and pass.
        misses: Chosen experts that were read.
        read_bytes: Bytes read.
    """

    slots: int
    experts: int
    resident_bytes: int
    hits: int
    misses: int
    read_bytes: int

    def __str__(self) -> str:
        chosen = self.hits + self.misses
        share = f", {self.hits / chosen:.1%} of {chosen} choices in memory" if chosen else ""
        return (
            f"{self.slots} of {self.experts} experts in {format_bytes(self.resident_bytes)}{share}, "
            f"{format_bytes(self.read_bytes)} read"
        )


def expert_budget(
    specs: Sequence[OpSpec],
    experts_gib: float,
    popular: Mapping[int, Sequence[int]],
) -> ExpertBudget | None:
    """Return the budget of a model's experts; None if it holds all of them.

    Args:
        specs: The experts of each layer, by :func:`heterollm.model.expert_specs`.
        experts_gib: Memory for packed weights in GiB.
        popular: Tokens of each expert by layer: those with the most are the first residents. Empty for the
            first experts of each layer.

    Raises:
        OptionError: The model has no experts, or the budget does not hold those of a token in one layer.
        CalibrationError: The tokens are those of another mixture.
    """
    if not specs:
        raise OptionError("A model without experts has no memory of experts.", fix="Leave --experts-gib out.")
    (size,) = {_slot_bytes(spec) for spec in specs}
    routing = specs[0].experts
    assert routing is not None  # by expert_specs
    slots = int(experts_gib * GIB) // size
    if slots >= len(specs) * routing.experts:
        return None
    if slots < routing.chosen:
        need = math.ceil(100 * routing.chosen * size / GIB) / 100
        raise OptionError(
            f"A token chooses {routing.chosen} experts of {format_bytes(size)} each in a layer, and "
            f"{experts_gib:g} GiB hold {slots}.",
            fix=f"Give --experts-gib {max(need, 0.01):g} or more.",
        )
    every = [(spec.layer, expert) for spec in specs for expert in range(routing.experts)]
    if popular and every != [(layer, expert) for layer in popular for expert in range(len(popular[layer]))]:
        raise CalibrationError(
            "The calibration has experts of another model.", fix="Calibrate the model that is loaded."
        )
    order = sorted(every, key=lambda own: (-popular[own[0]][own[1]] if popular else 0, own[1], own[0]))
    return ExpertBudget(slots, slots * size, tuple(order[:slots]))


class ExpertResidency:
    """The slots of a model's experts, and the reading of experts into them; used on the engine thread alone.

    Args:
        device: The device.
        weights: Weights of a model with experts.
        budget: The budget.
        tokens: Tokens of the longest pass.

    Attributes:
        gate_up: Slots of gate and up.
        down: Slots of down.
        table: int32 ``[rounds, experts]``: the slot of each expert of the present layer, or -1.
    """

    def __init__(self, device: Device, weights: ModelWeights, budget: ExpertBudget, tokens: int) -> None:
        first = weights.experts[0]
        assert first.experts is not None  # by expert_specs
        assert first.then is not None
        self._gpu, self._budget = device.gpu, budget
        self._experts = first.experts.experts
        self._layers = len(weights.experts)

        def reserved(spec: OpSpec) -> GroupedLinear:
            return GroupedLinear.reserve(
                device.gpu,
                spec.member_rows,
                spec.columns,
                spec.weight,
                activation_dtype=device.activation_dtype,
                integer_inputs=spec.integer_inputs,
                slots=budget.slots,
            )

        self.gate_up, self.down = reserved(first), reserved(first.then)
        # The specification of an expert's layer differs in nothing but the layer.
        self._specs = {spec.layer: spec for spec in weights.experts}
        self._reader = ExpertReader(weights)
        rounds = self.rounds(ExpertShape(first.experts, tokens))
        self._slots_of = np.full((rounds, self._experts), -1, np.int32)
        self.table = DeviceMemory(device.gpu.scratch(self._slots_of.nbytes), self._slots_of.nbytes)
        # Slots by layer and expert, those used longest ago first; then slots without an expert.
        self._held: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._free = list(range(budget.slots))
        self._loads: list[list[tuple[int, int]]] = [[] for _ in range(rounds)]
        self._hits = self._misses = self._start_bytes = 0

    @property
    def slots(self) -> int:
        """Experts that memory holds at once."""
        return self._budget.slots

    @property
    def reads(self) -> ExpertReads:
        """The counts since the last reset."""
        return ExpertReads(
            self._budget.slots,
            self._layers * self._experts,
            self.gate_up.size_bytes + self.down.size_bytes,
            self._hits,
            self._misses,
            self._reader.read_bytes - self._start_bytes,
        )

    def reset_counts(self) -> None:
        """Count from 0 again."""
        self._hits = self._misses = 0
        self._start_bytes = self._reader.read_bytes

    def close(self) -> None:
        """Close the files; no compiled pass may run afterwards."""
        self._reader.close()

    def rounds(self, shape: ExpertShape) -> int:
        """Return the rounds that a pass needs at most."""
        return -(-min(shape.routing.experts, shape.pairs) // self._budget.slots)

    def fill(self, progress: Progress) -> None:
        """Read the first residents, the most popular of them last, so that they stay longest."""
        self._forget()
        for done, (layer, expert) in enumerate(reversed(self._budget.first)):
            progress("Reading experts", done, self._budget.slots)
            slot = self._free.pop()
            self._load(layer, expert, slot)
            self._held[layer, expert] = slot
        progress("Reading experts", self._budget.slots, self._budget.slots)

    def calls(
        self, layer: int, chosen: DeviceMemory, shape: ExpertShape, placement: ExpertsPlacement
    ) -> list[Callable[[], None]]:
        """Return the calls that bring the experts of each round into slots.

        Args:
            layer: Decoder layer.
            chosen: The choices of the pass.
            shape: Sizes of the pass.
            placement: The experts that the NPU computes up to a capacity; beyond it they are the GPU's.
        """
        found = np.empty(shape.pairs, np.int32)
        limits = np.array(placement.capacities(self._experts), np.int64)
        if placement.overflow == "drop":
            limits[limits > 0] = shape.tokens
        rounds = self.rounds(shape)
        begin = functools.partial(self._begin, layer, chosen, found, limits, rounds)
        return [begin, *(functools.partial(self._load_round, layer, number) for number in range(1, rounds))]

    def _begin(
        self,
        layer: int,
        chosen: DeviceMemory,
        found: NDArray[np.int32],
        limits: NDArray[np.int64],
        rounds: int,
    ) -> None:
        """Wait for the choices of a layer, assign experts to rounds and slots, and load the first round."""
        self._gpu.copy(found, chosen.buffer)
        counts = np.bincount(found, minlength=self._experts)
        needed = np.flatnonzero(counts > limits).tolist()
        held = [expert for expert in needed if (layer, expert) in self._held]
        missing = [expert for expert in needed if (layer, expert) not in self._held]
        self._hits += len(held)
        self._misses += len(missing)
        # Those in memory are in the first round, before others take their slots.
        order, slots = held + missing, self._budget.slots
        self._slots_of[:rounds] = -1
        for number in range(rounds):
            own = order[number * slots : (number + 1) * slots]
            self._assign(layer, own, self._slots_of[number], self._loads[number])
        self._gpu.copy(self.table.buffer, self._slots_of[:rounds])
        self._load_round(layer, 0)

    def _assign(
        self, layer: int, experts: Iterable[int], slots: NDArray[np.int32], loads: list[tuple[int, int]]
    ) -> None:
        """Give the experts of a round slots, and list those to load."""
        loads.clear()
        missing = []
        for expert in experts:
            if (layer, expert) in self._held:
                self._held.move_to_end((layer, expert))
                slots[expert] = self._held[layer, expert]
            else:
                missing.append(expert)
        for expert in missing:
            slot = self._free.pop() if self._free else self._held.popitem(last=False)[1]
            self._held[layer, expert] = slot
            slots[expert] = slot
            loads.append((expert, slot))

    def _load_round(self, layer: int, number: int) -> None:
        for expert, _ in self._loads[number]:
            self._reader.read_ahead(self._specs[layer], expert)
        try:
            for expert, slot in self._loads[number]:
                self._load(layer, expert, slot)
        except BaseException:
            # Slots that were given to experts of this pass do not hold them.
            self._forget()
            raise

    def _load(self, layer: int, expert: int, slot: int) -> None:
        gate_up, down = self._reader.read(self._specs[layer], expert)
        self.gate_up.fill(slot, gate_up)
        self.down.fill(slot, down)

    def _forget(self) -> None:
        """Empty all slots."""
        self._held.clear()
        self._free[:] = range(self._budget.slots)


def _slot_bytes(spec: OpSpec) -> int:
    """Return the packed size of an expert."""
    assert spec.then is not None  # by expert_specs
    return sum(packed_bytes(own.weight, own.member_rows, own.columns) for own in (spec, spec.then))
