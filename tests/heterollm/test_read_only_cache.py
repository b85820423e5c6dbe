import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from heterollm.data import bundled_model

SCRIPT = """
import ctypes, os, struct, sys
if sys.argv[2] == "reader":
    if os.getuid() == 0:  # root without its capabilities has the rights of the files' owner
        ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    assert not os.access(os.environ["HETEROLLM_CACHE"], os.W_OK)
from heterollm import LLM
with LLM.load(sys.argv[1], device="host", plan="gpu", context=64) as llm:
    print(llm.generate([1, 2], max_new_tokens=4).token_ids)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="rights are taken away as Linux does")
def test_a_complete_cache_that_cannot_be_written_is_used():
    # Beside pytest's own folders, which only their owner may read.
    with tempfile.TemporaryDirectory(prefix="heterollm-read-only-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        cache, model = folder / "cache", shutil.copytree(bundled_model(), folder / "model")
        environment = os.environ | {"HETEROLLM_CACHE": str(cache), "HOME": str(folder)}
        environment.pop("POCL_CACHE_DIR", None)
        answers = []
        for role in ("writer", "reader"):
            done = subprocess.run(
                [sys.executable, "-P", "-c", SCRIPT, str(model), role],
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert done.returncode == 0, done.stderr
            answers.append(done.stdout)
            for path in (cache, *cache.rglob("*")):
                path.chmod(0o555 if path.is_dir() else 0o444)
        assert answers[0] == answers[1]
        for path in (cache, *cache.rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
