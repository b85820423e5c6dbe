"""NPUs without a phone, and the operations of a graph as QNN's compiler has lowered it."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from heterollm.kernels.npu import HostNpu, QnnNpu
from heterollm.kernels.npu.graphs import write_graph

OPEN_AND_TRACE = """
import sys
from pathlib import Path
from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_session
import json
options = json.loads(sys.argv[2]) | {"profiling_level": "optrace", "profiling_file_path": "profile.csv"}
open_session(Path(sys.argv[1]), QnnTarget(True, options), "traced")
"""

BASE = {
    "backend_type": "htp",
    "soc_model": "57",
    "enable_htp_fp16_precision": "1",
    "htp_graph_finalization_optimization_mode": "3",
}


@pytest.fixture
def npu():
    """ONNX Runtime's CPU provider, anew for each test."""
    backend = HostNpu()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def host():
    """The same for all tests of a file; in this folder it takes the place of the device."""
    backend = HostNpu()
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def emulator():
    """Qualcomm's emulator for all tests of a file; the tests are marked."""
    backend = QnnNpu(emulator=True)
    yield backend
    backend.close()


@pytest.fixture
def compiled(tmp_path):
    """A function that returns a graph's operations and memory blocks with some options of the compiler."""

    def compile_graph(shard, form, length, options):
        model = write_graph(shard, form, np.dtype(np.float16), tmp_path, length)
        command = [sys.executable, "-P", "-c", OPEN_AND_TRACE, str(model), json.dumps(BASE | options)]
        subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, timeout=600)
        [schematic] = tmp_path.glob("*_schematic.bin")
        text = schematic.read_bytes().decode("latin-1")
        schematic.unlink()
        graph = text.split(":::BEGIN:graph_after_optimization:::")[1]
        graph = graph.split(":::END:graph_after_optimization:::")[0]
        operations = re.findall(r"'operation':'([^']+)'", graph)
        [blocks] = re.findall(r"total [1-9][0-9]* bytes in (\d+) blocks, in \d+ groups", text)[:1]
        return operations, int(blocks)

    return compile_graph
