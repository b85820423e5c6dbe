"""Made-up devices and models for tests of the solver, whose times are known."""

import math
import random

import pytest

from heterollm.kernels.ops import Member, OpSpec, WeightFormat
from heterollm.solver.candidates import NpuLimits
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

    def slowdown(self, spec, tokens):
        return self._slowdown

    def between_us(self, spec, tokens):
        return self._draw("between", spec.group, tokens)

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


def make_spec(group, rows, columns=64, layer=0, weight=FLOAT):
    members = tuple(Member(f"{group}{place}", count) for place, count in enumerate(rows))
    return OpSpec(group, layer, members, columns, weight, "source", "target")


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


def make_limits(lengths=(1, 32, 64, 128), alignment=64, forms=("plain",)):
    return NpuLimits(tuple(lengths), alignment, lambda spec, length: tuple(forms))


class Made:
    """What the tests take from here."""

    free = Overheads()
    costs = RandomCosts
    proportional = ProportionalCosts
    spec = staticmethod(make_spec)
    model = staticmethod(make_model)
    limits = staticmethod(make_limits)


@pytest.fixture(scope="session")
def made():
    return Made
