"""Runs the linear kernels with half arithmetic on a runtime that has it; a script of test_half_arithmetic.py.

Prints, for each case, the case, the error of the whole and the worst of a row or token.
"""

import itertools
import json

import numpy as np

from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import KernelParameters, OpenClRuntime, Variant, list_opencl_devices
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.ops import WeightFormat


def cases():
    """Yield formats, tiles and shapes: odd rows and tokens, blocks of each size, and a model's depth."""
    for (bits, block), symmetric in itertools.product(((4, 16), (4, 32), (4, 128), (8, 32)), (True, False)):
        for tokens, columns in ((9, 128), (33, 384), (65, 256)):
            yield WeightFormat(bits, block, symmetric=symmetric), tokens, columns
    yield WeightFormat(16), 17, 48
    yield WeightFormat(4, 32), 64, 4096


def main() -> None:
    """Print the errors of every case."""
    device = next(device for _, device in list_opencl_devices() if "cl_khr_fp16" in device.extensions)
    runtime, found = OpenClRuntime(device), []
    for weight, tokens, columns in cases():
        depths = (16, 32) if weight.block % 32 == 0 and weight.block else (16,)
        for item_tokens, depth in itertools.product((4, 8, 16), depths):
            parameters = KernelParameters("half", True, 64, item_tokens=item_tokens, depth_inputs=depth)
            case = LinearCase(weight, (70, 3), columns, tokens)
            y, exact = case.on_gpu(runtime, np.float16, style=Variant("half", parameters=parameters))
            errors = linear_errors(y, exact)
            found.append((f"{weight} {tokens}x{columns} {parameters}", errors.nmse, errors.within("fp16")))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
