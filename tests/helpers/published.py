"""Files of published models, which ``bench/published_model.py`` fetches."""

import os
import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def fetched(variable: str, function: str, folder: Path) -> Path:
    """Return the file or folder that an environment variable names, or else what a function fetches."""
    if named := os.environ.get(variable):
        return Path(named).resolve(strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        script = runpy.run_path(str(BENCH / "published_model.py"))
        try:
            found: Path = script[function](folder)
        except script["InputError"] as error:
            pytest.skip(f"{error.message} {error.fix}")
    return found
