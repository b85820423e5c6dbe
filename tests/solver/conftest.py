"""Made-up devices and models for tests of the solver, whose times are known."""

import math
import random

import pytest

from heterollm.kernels.ops import Member, OpSpec, WeightFormat
from heterollm.solver import NpuLimits
from heterollm.solver.chain import solve_chain
from heterollm.solver.costs import Overheads, Slowdown

FLOAT = WeightFormat(16)


class RandomCosts:
    """Times that are any numbers, the same for equal questions in every process.

    ``missing`` is how often the NPU cannot compute a slice.
    """

    def __init__(self, seed, *, overheads=None, slowdown=None, missing=0.0, low=1.0, high=1000.0):
        draw = random.Random(f"{seed}")
        self.seed, self.missing, self.low, self.high = seed, missing, low, high
        self.overheads = overheads or Overheads(*(draw.uniform(0, 200) for _ in range(3)))
        self._slowdown = slowdown or Slowdown(draw.uniform(1, 2), draw.uniform(1, 2))

    def gpu_us(self, spec, member_rows, tokens):
        return self._draw("gpu", spec.group, member_rows, tokens)

    def npu_us(self, spec, member_rows, length, form):
        if random.Random(f"{self.seed} none {spec.group} {member_rows} {length}").random() < self.missing:
            return math.inf
        return self._draw("npu", spec.group, member_rows, length, form)

    def slowdown(self, spec, tokens, form="", length=0):
        return self._slowdown

    def between_us(self, spec, tokens):
        return self._draw("between", spec.group, tokens)

    def mixture_us(self, tokens, kind=""):
        return ()

    def kernels_us(self, spec):
        # The kernels before the output projection: a short one, then attention in two.
        parts = (0.1, 0.6, 0.3) if spec.group == "o" else (1.0,)
        return tuple(part * self.between_us(spec, 1) for part in parts)

    def _draw(self, *what):
        # A text as seed does not depend on the process's hash seed.
        return random.Random(f"{self.seed} {what}").uniform(self.low, self.high)


class ProportionalCosts(RandomCosts):
    """Times that grow with work and have a floor, each group at speeds of its own."""

    def gpu_us(self, spec, member_rows, tokens):
        speed = self._draw("gpu", spec.group)
        return 5.0 + sum(member_rows) * spec.columns * (30 + tokens) / (100 * speed)

    def npu_us(self, spec, member_rows, length, form):
        speed = self._draw("npu", spec.group, form)
        return 20.0 + sum(member_rows) * spec.columns * (30 + length) / (100 * speed)


class BlockCosts(RandomCosts):
    """Random times that depend on columns as well: of a down projection that is cut with its block."""

    def gpu_us(self, spec, member_rows, tokens):
        return self._draw("gpu", spec.group, spec.columns, member_rows, tokens)

    def between_us(self, spec, tokens):
        return self._draw("between", spec.group, spec.columns, tokens) / 4


class ProportionalBlockCosts(ProportionalCosts):
    """Times that grow with work; of a block with that of all three linears, at a speed of its own."""

    def npu_us(self, spec, member_rows, length, form):
        own_us = super().npu_us(spec, member_rows, length, form)
        if spec.then is None:
            return own_us
        speed = self._draw("npu", spec.group, form)
        return own_us + member_rows[0] * spec.then.rows * (30 + length) / (100 * speed)

    def between_us(self, spec, tokens):
        return 3.0 + spec.columns * tokens / 2000


def make_spec(group, rows, columns=64, layer=0, weight=FLOAT):
    members = tuple(Member(f"{group}{place}", count) for place, count in enumerate(rows))
    before = ("rms_norm",) if group in ("qkv", "gate_up", "head") else ("gated_activation",)
    return OpSpec(group, layer, members, columns, weight, "source", "target", before=before)


def make_model(layers=2, *, hidden=256, keys=64, wide=512, vocabulary=640):
    """Return the specs of a small model."""
    sizes = {
        "qkv": ((hidden, keys, keys), hidden),
        "o": ((hidden,), hidden),
        "gate_up": ((wide, wide), hidden),
        "down": ((hidden,), wide),
    }
    specs = [
        make_spec(group, rows, columns, layer)
        for layer in range(layers)
        for group, (rows, columns) in sizes.items()
    ]
    return (*specs, make_spec("head", (vocabulary,), hidden, -1))


def make_limits(lengths=(1, 32, 64, 128), alignment=64, forms=("plain",), ffn_forms=None):
    """Return limits with some forms of linears, and of blocks if others than those."""
    of_blocks = forms if ffn_forms is None else ffn_forms

    def legal(spec, length):
        return tuple(forms if spec.then is None else of_blocks)

    return NpuLimits(tuple(lengths), alignment, legal)


def simulate(gpu_us, npu_us, slowdown, npu_begin_us):
    """Step from event to event: who runs until then, and how fast."""
    now, left, ends = 0.0, {"gpu": gpu_us, "npu": npu_us}, {}
    while len(ends) < 2:
        running = [part for part in left if part not in ends and (part == "gpu" or now >= npu_begin_us)]
        both = len(running) == 2
        rate = {"gpu": 1 / slowdown.gpu if both else 1.0, "npu": 1 / slowdown.npu if both else 1.0}
        until = {part: now + left[part] / rate[part] for part in running}
        following = min([*until.values(), *([npu_begin_us] if now < npu_begin_us else [])])
        for part in running:
            left[part] -= (following - now) * rate[part]
            if until[part] == following:
                ends[part] = following
        now = following
    return ends["gpu"], ends["npu"]


def head_choice(solver, rows, slices=None):
    """Return the placement of the head for some positions."""
    splits = None if solver.limits is None else slices
    head = (solver.head,)
    chain = solve_chain(head, 1, rows, solver.limits, solver.costs, solver.objective, splits, rows)
    return chain.choices[0]


class Made:
    """What the tests take from here."""

    free = Overheads()
    costs = RandomCosts
    proportional = ProportionalCosts
    block_costs = BlockCosts
    proportional_blocks = ProportionalBlockCosts
    spec = staticmethod(make_spec)
    model = staticmethod(make_model)
    limits = staticmethod(make_limits)
    simulate = staticmethod(simulate)
    head_choice = staticmethod(head_choice)


@pytest.fixture(scope="session")
def made():
    return Made
