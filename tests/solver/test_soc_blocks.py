"""Where a block cut wins and where not, by a model of the Snapdragon 8 Gen 3 fitted to published numbers.

The equations and fitted values are those of a feasibility study on HeteroLLM's calibration numbers: the NPU
unpacks weights at a rate or computes in 32-wide tiles, and long streamed rows leave the chip; the GPU takes
the better of two kernels, one bound by memory and one that unpacks first. Times are modelled, never measured,
and nobody has published a block cut.
"""

import math

import pytest

from heterollm.kernels.npu import K_SPLIT_COLUMNS, STANDARD_LENGTHS
from heterollm.kernels.ops import WeightFormat
from heterollm.solver import NpuLimits, Objective, Solver
from heterollm.solver.costs import Overheads, Slowdown

BYTES_PER_WEIGHT = 4.125 / 8
UNPACKED, OPERATIONS, TILE_LOAD = 30.7e3, 5.6e6, 501  # weights/us, flop/us, rows streamed to load a tile
SPILLED = 50e3  # bytes/us, of weights whose rows are longer than the chip holds
GPU_BYTES, GPU_SMALL, GPU_UNPACKED, GPU_OPERATIONS = 43.5e3, 0.35e6, 5.0e3, 1.24e6
ATTENTION = 0.44e6
DRAM_BYTES = 61.9e3
GAP_US, POLL_US, REFILL_US, LAUNCH_US, LAUNCH_PAID = 2.4, 8.0, 77.0, 111.0, 0.2
LEAST_GAIN = 0.08

MODELS = {
    "8B": (4096, 14336, 1024, 128256, 32),
    "7B": (4096, 11008, 4096, 32000, 32),
    "3B": (3072, 8192, 1024, 128256, 28),
}
"""Hidden size, width of the feed-forward network, rows of the keys, vocabulary, layers."""


class Snapdragon:
    """The equations as costs; decode keeps the GPU's queue fed."""

    def __init__(self, tokens):
        self.overheads = Overheads(POLL_US, REFILL_US if tokens > 1 else 0.0)

    def gpu_us(self, spec, member_rows, tokens):
        weights = sum(member_rows) * spec.columns
        small = max(weights * BYTES_PER_WEIGHT / GPU_BYTES, 2 * weights * tokens / GPU_SMALL)
        return GAP_US + min(small, weights / GPU_UNPACKED + 2 * weights * tokens / GPU_OPERATIONS)

    def npu_us(self, spec, member_rows, length, form):
        own_us = self.linear_us(sum(member_rows), spec.columns, length, form)
        if spec.then is not None:
            own_us += self.linear_us(spec.then.rows, member_rows[0], length, form)
        return LAUNCH_PAID * LAUNCH_US + own_us

    def linear_us(self, rows, columns, length, form):
        weights = rows * columns
        row_tiles, column_tiles, token_tiles = (math.ceil(size / 32) for size in (rows, columns, length))
        streamed_us = weights / UNPACKED
        if columns > K_SPLIT_COLUMNS and form.endswith("k_chunked"):
            streamed_us += (math.ceil(columns / K_SPLIT_COLUMNS) - 1) * 8 * rows * length / SPILLED
        elif columns > K_SPLIT_COLUMNS:
            streamed_us += 2 * weights / SPILLED * (1 + token_tiles)
        tiles_us = column_tiles * token_tiles * (32 * row_tiles + TILE_LOAD) * 2048 / OPERATIONS
        return max(streamed_us, tiles_us)

    def slowdown(self, spec, tokens, form="", length=0):
        if tokens > 1:
            return Slowdown(1.06, 1.06)
        # What spills leaves the GPU little bandwidth; cuts of a block at one token have short rows.
        spills = spec.columns > K_SPLIT_COLUMNS
        return Slowdown(gpu=GPU_BYTES / (DRAM_BYTES - SPILLED)) if spills else Slowdown()

    def between_us(self, spec, tokens):
        values = {"qkv": 4, "o": 6, "gate_up": 4, "down": 3, "head": 1}[spec.group] * spec.columns
        attention_us = 2 * tokens**2 * spec.columns / ATTENTION if spec.group == "o" else 0.0
        return GAP_US + 2 * values * tokens / GPU_BYTES + attention_us


def forms_of(*, chunked):
    def forms(spec, length):
        plain = "plain" if spec.then is None else "ffn"
        columns = spec.columns if spec.then is None else spec.then.columns
        pieces = "k_chunked" if spec.then is None else "ffn_k_chunked"
        return (plain, pieces) if chunked and columns > K_SPLIT_COLUMNS else (plain,)

    return forms


def solve(made, model, tokens, level, *, chunked=False):
    """Return the chain of a level and the time of a token or prompt, one row of the head included."""
    hidden, wide, keys, vocabulary, layers = MODELS[model]
    sizes = {
        "qkv": ((hidden, keys, keys), hidden),
        "o": ((hidden,), hidden),
        "gate_up": ((wide, wide), hidden),
        "down": ((hidden,), wide),
    }
    weight = WeightFormat(4, 128)
    specs = [
        made.spec(group, rows, columns, layer, weight)
        for layer in range(layers)
        for group, (rows, columns) in sizes.items()
    ]
    specs.append(made.spec("head", (vocabulary,), hidden, -1, weight))
    limits = NpuLimits(STANDARD_LENGTHS, 256, forms_of(chunked=chunked))
    objective = Objective(margin_fraction=LEAST_GAIN)
    solver = Solver(tuple(specs), limits, Snapdragon(tokens), objective, level=level)
    [chain] = solver.length(tokens).chains
    return chain, chain.time_us + made.head_choice(solver, 1).chosen.time_us


def speedup(made, model, tokens, *, chunked=False):
    """Return how much faster level block is than level tensor, and its chain."""
    _, tensor_us = solve(made, model, tokens, "tensor", chunked=chunked)
    chain, block_us = solve(made, model, tokens, "block", chunked=chunked)
    return tensor_us / block_us, chain


def test_the_model_is_near_what_was_published(made):
    """Llama-3-8B at tensor level: 236.92 tokens/s for 256 tokens, 247.9 for 1024, decode at 14.01."""
    for tokens, published in ((256, 236.92), (1024, 247.9), (1, 14.01)):
        _, time_us = solve(made, "8B", tokens, "tensor")
        assert tokens / time_us * 1e6 == pytest.approx(published, rel=0.13)


@pytest.mark.parametrize(
    ("model", "low", "high"), [("8B", 1.06, 1.095), ("7B", 1.05, 1.09), ("3B", 1.05, 1.09)]
)
def test_a_block_wins_decode(made, model, low, high):
    """It makes FFN-down splittable: the NPU's columns of it are too few to spill."""
    gain, chain = speedup(made, model, 1)
    assert low <= gain <= high
    chosen = chain.choices[-1]
    assert (chosen.spec.group, chosen.chosen.is_split) == ("ffn", True)
    width = chosen.chosen.placement.npu_rows[0]
    assert width <= K_SPLIT_COLUMNS
    assert 0.2 <= width / MODELS[model][1] <= 0.3
    # What it is better than: gate and up cut, and all of FFN-down on the GPU.
    gate_up, down = chain.rejected_path
    assert (gate_up.chosen.is_split, down.chosen.placement.npu_lengths) == (True, ())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [64, 256])
def test_one_ratio_does_not_win_prefill(made, model, tokens):
    """The GPU is six times slower at gate and up and 1.5 times at down: they are placed apart."""
    gain, chain = speedup(made, model, tokens)
    assert gain == 1.0
    assert [choice.spec.group for choice in chain.choices] == ["qkv", "o", "gate_up", "down"]
    shares = [
        choice.chosen.placement.npu_rows[0] / choice.spec.member_rows[0] for choice in chain.choices[-2:]
    ]
    assert shares[0] > 0.85
    assert shares[1] < 0.75
    # The best block of all is slower than the two groups and the activation between them.
    (block,) = chain.rejected_path
    apart_us = sum(choice.chosen.time_us for choice in chain.choices[-2:])
    assert min(item.time_us for item in (block.chosen, *block.others)) > apart_us


@pytest.mark.parametrize("tokens", [64, 256, 1024])
def test_pieces_make_a_block_win_prefill(made, tokens):
    """With FFN-down in pieces both are fast on the NPU, and one join is better than two."""
    gain, chain = speedup(made, "8B", tokens, chunked=True)
    assert 1.01 <= gain <= 1.06
    assert chain.choices[-1].spec.group == "ffn"
    assert chain.choices[-1].chosen.placement.form == "ffn_k_chunked"
