import os
import subprocess
import sys

from heterollm.data import bundled_model

# The NPU of `host` runs in this process and in one that knows nothing of heterollm.
SCRIPT = """
import subprocess, sys
from heterollm import LLM
with LLM.load(sys.argv[1], device="host", plan="npu", context=64) as llm:
    assert llm.generate([1, 2, 3], max_new_tokens=2).token_ids
import onnxruntime
subprocess.run([sys.executable, "-P", "-c", '''
import onnx
import onnxruntime
value = onnx.helper.make_tensor_value_info("x", 1, [1])
other = onnx.helper.make_tensor_value_info("y", 1, [1])
graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [value], [other])
model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
'''], check=True)
"""


def test_nothing_is_written_into_the_home_folder(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    folders = {"HOME": str(home), "USERPROFILE": str(home), "LOCALAPPDATA": str(home / "local")}
    left_out = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | folders
    subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(bundled_model())], check=True, env=environment, timeout=600
    )
    assert not list(home.rglob("*"))
