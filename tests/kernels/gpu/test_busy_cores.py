"""Steps of tokens that keep the cores of a CPU busy, where the row tiles of small models do not."""

import pytest

from heterollm.kernels.gpu import ShapeClass, default_parameters
from heterollm.kernels.gpu.parameters import UNPACKING_TOKENS, Division
from heterollm.kernels.ops import WeightFormat

# Rows and inputs of the linears of a layer.
MODELS = {
    "SmolLM2-135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "gemma-3-270m": ((1536, 640), (640, 1024), (4096, 640), (640, 2048)),
    "Qwen2.5-0.5B": ((1152, 896), (896, 896), (9728, 896), (896, 4864)),
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
}


def vector_grid(rows, inputs, tokens, units):
    shape = ShapeClass.of(WeightFormat(4, 32), integer_inputs=False, half=False, tokens=tokens)
    parameters, tiles = default_parameters("vector", shape), -(-rows // 64)
    return parameters.grid(tokens, tiles, Division(units, inputs, 32, tiles))


def core_time(layer, tokens, cores):
    """Time of a layer in which a core multiplies one input of a tile's half with one token."""
    total = 0
    for rows, inputs in layer:
        grid = vector_grid(rows, inputs, tokens, cores)
        groups = grid.global_size[0] * grid.global_size[1]
        total += -(-groups // cores) * (grid.token_step + UNPACKING_TOKENS) * inputs
    return total


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [64, 128, 256, 512])
@pytest.mark.parametrize("cores", [4, 8, 12, 16])
def test_small_models_keep_cores_busy(model, tokens, cores):
    """The longest steps would keep 78 % of 16 cores busy with 128 tokens of SmolLM2-135M."""
    assert core_time(MODELS[model], tokens, 1) / cores / core_time(MODELS[model], tokens, cores) > 0.85


def test_few_cores_share_unpacked_weights_as_far_as_possible():
    for tokens, step in ((256, 128), (300, 104), (1024, 128), (100, 104)):
        assert vector_grid(2048, 2048, tokens, 2).token_step == step


def test_a_token_is_computed_once():
    for units in (1, 3, 16, 64):
        for tokens in range(9, 300, 7):
            grid = vector_grid(576, 576, tokens, units)
            assert (
                (grid.global_size[1] - 1) * grid.token_step < tokens <= grid.global_size[1] * grid.token_step
            )
