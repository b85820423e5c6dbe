"""What the stand-ins have counted in this process."""

import ctypes
import os
from pathlib import Path


def counts() -> dict[str, int]:
    folder = Path(os.environ["STAND_INS"])
    files = {"libQnnHtp.so": "backend", "libcdsprpc.so": "stand_in", "libopencl_layer.so": "layer"}
    count = {
        prefix: getattr(ctypes.CDLL(str(folder / name)), f"{prefix}_count") for name, prefix in files.items()
    }
    return {
        "allocations": count["stand_in"](0),
        "live": count["stand_in"](1),
        "imports": count["layer"](0),
        "registered": count["backend"](0),
        "handles": count["backend"](1),
        "runs": count["backend"](2),
        "in_place": count["backend"](3),
        "copied": count["backend"](4),
    }
