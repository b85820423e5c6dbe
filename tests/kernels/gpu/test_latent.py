"""The operators of latent attention against float64, at sizes that fill no vector."""

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.operators.latent import HeadLinearCase, MemberNormCase, TurnCase

PAIRS = [
    *(("vector", np.float32), ("vector", np.float16), ("simt", np.float16)),
    pytest.param("simt", np.float32, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_operators_of_latent_attention(cases, check, style, dtype):
    made = cases(style, dtype, 1)
    for case in (
        TurnCase(5, 7, 3, 21, 10, (13,)),
        TurnCase(1, 0, 4, 512, 64, (0,), "sum"),
        TurnCase(33, 2, 2, 40, 16),
        MemberNormCase(5, 21, (7, 3)),
        MemberNormCase(2, 768, (0, 8), "sum"),
    ):
        for actual, exact in made(case):
            # What stays float carries the error of what does not.
            check((actual.astype(dtype), exact), case)
    for tokens, heads, inputs, outputs in ((1, 3, 21, 13), (6, 2, 40, 21), (9, 4, 128, 64)):
        for floats in (False, True):
            for join in ("concatenate", "sum"):
                case = HeadLinearCase(tokens, heads, inputs, outputs, (8, inputs), join, floats)
                for actual, exact in made(case):
                    check((actual.astype(dtype), exact), case)


def test_members_of_other_sizes_are_refused(cases):
    made = cases("vector")
    with pytest.raises(KernelError, match=r"members of \(33,\) rows are not those of"):
        made(TurnCase(3, 0, 3, 20, 11))
