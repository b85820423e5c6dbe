"""A model runs without the extras, and without packages that only prepare one: those of graphs, pyopencl."""

import json
import os
import subprocess
import sys

import pytest

from heterollm.exporting import export_model
from heterollm.llm import LLM

# To the process, and to a library that looks for them, they are not installed.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {"onnx", "ml_dtypes", "sklearn", "scipy", "joblib", "transformers", "torch", "pyopencl"}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
COMMAND = WITHOUT + "from heterollm.cli.command_line import main\nsys.exit(main(sys.argv[1:]))"
SERVE = """
from heterollm.llm import LLM
from heterollm.kernels.gpu import binding_name
import heterollm.serve.run, heterollm.serve.app

llm = LLM.load(sys.argv[1], device="host", plan="gpu")
print(binding_name().partition(",")[0], *llm.generate("import os", max_new_tokens=4).token_ids)
llm.close()
"""


def process(folder, script, *arguments):
    environment = os.environ | {"HETEROLLM_CACHE": str(folder / "cache")}
    environment.pop("HETEROLLM_OPENCL_BINDING", None)
    return subprocess.run(
        [sys.executable, "-P", "-c", script, *map(str, arguments)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("options", [("--help",), ("devices",), ("plan", "--help")])
def test_commands_need_none(options, tmp_path):
    done = process(tmp_path, COMMAND, *options)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_ctypes_binding_takes_over_and_computes(bundled_model, host, tmp_path):
    done = process(tmp_path, WITHOUT + SERVE, bundled_model)
    assert done.returncode == 0, done.stderr
    name, *tokens = done.stdout.split()
    assert name == "ctypes"
    assert len(tokens) == 4


def test_an_answer_is_the_same_and_needs_none(bundled_model, host, tmp_path):
    options = ("generate", bundled_model, "import os", "--device", "host", "--max-new-tokens", "8", "--json")
    asked = "from heterollm.cli.command_line import main\nimport sys\nsys.exit(main(sys.argv[1:]))"
    found = []
    for script in (asked, COMMAND, COMMAND):  # the last finds the weights in the cache
        done = process(tmp_path, script, *options)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["text"])
    assert found[0] == found[1] == found[2]


def test_writing_a_graph_says_which_package_it_needs(bundled_model, host, tmp_path):
    options = ("generate", bundled_model, "import os", "--device", "host", "--plan", "layer")
    done = process(tmp_path, COMMAND, *options)
    assert done.returncode == 1
    words = " ".join(done.stderr.split())
    assert "cannot be written: No module named" in words
    assert "`pip install onnx`" in words


def test_an_exported_model_with_graphs_needs_none(bundled_model, host, tmp_path):
    export_model(bundled_model, tmp_path / "exported", device="host", plan="layer")
    options = ("generate", tmp_path / "exported", "import os", "--max-new-tokens", "8")
    done = process(tmp_path, COMMAND, *options)
    assert done.returncode == 0, done.stderr
    with LLM.load(bundled_model, device="host", plan="layer") as llm:
        assert done.stdout.strip() == llm.generate("import os", max_new_tokens=8, temperature=0).text.strip()
