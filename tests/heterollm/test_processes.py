import json
import os
import subprocess
import sys

import pytest

from heterollm.data import bundled_model

SCRIPT = """
import json, os, sys
from heterollm import LLM
from heterollm.base import HeteroLLMError

def load():
    return LLM.load(sys.argv[1], device="host", plan="gpu", context=64)

def attempt(call):
    try:
        call()
    except HeteroLLMError as error:
        return str(error)
    return "no error"

if pid := os.fork():  # nothing is open yet, so the child is as good as its parent
    assert os.waitpid(pid, 0)[1] == 0
else:
    with load() as llm:
        llm.generate([1, 2], max_new_tokens=2)
    os._exit(0)

llm = load()
session = llm.session()
session.prefill([1, 2])
reader, writer = os.pipe()
if os.fork():
    os.close(writer)
    with open(reader) as file:
        print(file.read())
    session.decode(3)  # the parent goes on
    llm.close()
else:
    found = [attempt(lambda: llm.generate([1, 2], max_new_tokens=2)), attempt(lambda: session.decode(3))]
    found += [attempt(llm.session), attempt(load)]
    llm.close()
    os.write(writer, json.dumps(found).encode())
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on():
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", SCRIPT, str(bundled_model())],
        check=True,
        capture_output=True,
        timeout=600,
    )
    assert b"Exception ignored" not in done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    assert all("was forked from one that had opened a device" in text and "spawn" in text for text in found)


SPAWN = """
import multiprocessing
from heterollm import LLM
from heterollm.data import bundled_model

def answer(results):
    with LLM.load(bundled_model(), device="host", plan="gpu", context=64) as llm:
        results.put(llm.generate([1, 2], max_new_tokens=4).token_ids)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with LLM.load(bundled_model(), device="host", plan="gpu", context=64) as llm:
        results = spawn.Queue()
        child = spawn.Process(target=answer, args=(results,))
        child.start()
        assert results.get(timeout=600) == llm.generate([1, 2], max_new_tokens=4).token_ids
        child.join()
"""


def test_a_spawned_child_loads_beside_its_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWN)
    subprocess.run([sys.executable, "-P", str(script)], check=True, timeout=600)
