"""The demonstration: text from the bundled model, a profile, plans, and the rate of each plan level."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from safetensors.numpy import save_file

from heterollm.base import CacheError, Progress, silent
from heterollm.data import bundled_model
from heterollm.kernels.npu import TimeKind
from heterollm.llm import LLM
from heterollm.solver import LEVELS

if TYPE_CHECKING:
    from heterollm.benchmarks.run import BenchResult
    from heterollm.engine import Sync

__all__ = ["DemoResult", "DemoWorkload", "run_demo", "write_layer_checkpoint"]

PROMPT: Final = "import os\n\ndef read_lines(path):\n"
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 3
"""Sampling of the shown text: greedy text of a small model repeats itself."""
PREFILL_TOKENS: Final = 256
DECODE_TOKENS: Final = 32
CONTEXT: Final = 512
REPETITIONS: Final = 5
PROFILE_BUDGET_S: Final = 45.0

SOLVED: Final = ("tensor", "block")
"""Levels that the solver plans from the profile."""

BUNDLED: Final = "bundled model"
LAYER: Final = "TinyLlama layer"
LAYER_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    # A small vocabulary: the head, which a single layer of a real model lacks, takes little time.
    "vocab_size": 256,
}
"""One layer of TinyLlama-1.1B (https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0)."""

LEGEND: Final = (
    "gpu: everything on the GPU. npu: every linear on the NPU. layer: the linears of prefill on the NPU. "
    "tensor: every linear on one processor, or split between both, which then work at once, as the profile "
    "predicts the least time. block: as tensor, and whole feed-forward networks may be split, too. GPU and "
    "NPU have different cores; the last row is the GPU with the cores of both."
)

NO_BLOCK: Final = (
    "Level block is left out: the time to profile ended before a feed-forward network was measured. "
    "`heterollm profile` measures some."
)


@dataclass(frozen=True, slots=True)
class DemoWorkload:
    """The plan levels on one model.

    Args:
        name: Name of the model.
        bench: Rows of all levels.
        verdicts: Verdicts in words.
    """

    name: str
    bench: BenchResult
    verdicts: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        rows = [row.to_dict() for row in self.bench.rows]
        return {"workload": self.name, "rows": rows, "verdicts": list(self.verdicts)}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of the demonstration.

    Args:
        prompt: Prompt of the bundled model.
        text: Its answer.
        levels_agree: Whether all levels wrote the same text from the likeliest tokens.
        device: Description of the device.
        time: Kind of its times.
        workloads: Rates of the plan levels; empty if the times are not real.
        notes: Remarks on the numbers.
    """

    prompt: str
    text: str
    levels_agree: bool
    device: Mapping[str, Any]
    time: TimeKind
    workloads: tuple[DemoWorkload, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "levels_agree": self.levels_agree,
            "device": dict(self.device),
            "time": self.time,
            "workloads": [workload.to_dict() for workload in self.workloads],
            "notes": list(self.notes),
        }


def run_demo(
    *,
    device: str = "auto",
    max_new_tokens: int = 64,
    sync: str = "auto",
    on_text: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> DemoResult:
    """Generate with the bundled model, profile the device, and measure every plan level.

    Args:
        device: Name of the device, or ``auto``.
        max_new_tokens: Length of the text.
        sync: How the processors wait for each other; see :meth:`heterollm.LLM.load`.
        on_text: Receives the text of level ``gpu`` piece by piece.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        HeteroLLMError: The device cannot be opened, or an option is not legal.
    """
    report = progress or silent
    load = partial(LLM.load, bundled_model(), device=device, sync=cast("Sync", sync), progress=report)
    with load(plan="gpu", context=CONTEXT) as model:
        answer = model.stream(
            PROMPT, max_new_tokens=max_new_tokens, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED
        )
        for step in answer:
            if on_text is not None:
                on_text(step.text)
        opened = model.device
        description, time_kind, name = opened.description(), opened.time_kind, opened.name
        notes = (f"Device auto chose {name}: {opened.reason}",) if opened.reason else ()
    levels: tuple[str, ...] = LEVELS
    workloads: tuple[DemoWorkload, ...] = ()
    with ExitStack() as stack:
        if time_kind == "real":
            layer = _layer_folder(stack, report)
            levels = (*levels, *SOLVED)
            if not _profile(name, (bundled_model(), layer), report):
                levels = tuple(level for level in levels if level != "block")
                notes = (*notes, NO_BLOCK)
            models = {BUNDLED: bundled_model(), LAYER: layer}
            workloads = tuple(_measured(models, name, levels, sync, report))
            notes = (*notes, LEGEND)
        else:
            notes = (*notes, f"No speeds: times on {name} are {time_kind}.")
        texts = set()
        for level in levels:
            with load(plan=level, context=CONTEXT) as model:
                texts.add(model.generate(PROMPT, max_new_tokens=max_new_tokens).text)
    return DemoResult(PROMPT, answer.result.text, len(texts) == 1, description, time_kind, workloads, notes)


def _layer_folder(stack: ExitStack, progress: Progress) -> Path:
    try:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="heterollm-demo-"))
        folder = Path(temporary, LAYER.replace(" ", "-"))  # the profile shows this name
        folder.mkdir()
        progress("Writing a layer of random weights", 0, 1)
        write_layer_checkpoint(folder)
        progress("Writing a layer of random weights", 1, 1)
    except OSError as error:
        raise CacheError(
            f"Cannot write a layer of weights into {tempfile.gettempdir()}: {error.strerror or error}.",
            fix="Free 100 MB there, or set TMPDIR to another folder.",
        ) from error
    return folder


def _profile(device: str, models: tuple[Path, ...], progress: Progress) -> bool:
    """Measure the points that plans for the models need, unless an earlier run has.

    Returns:
        Whether the profile has times of feed-forward networks, without which ``block`` cannot be planned.
    """
    from heterollm.planning import ProfilingSession
    from heterollm.profiler import SessionOptions
    from heterollm.profiler.records import LinearKey

    options = SessionOptions.of(quick=True, budget_s=PROFILE_BUDGET_S)
    with ProfilingSession(device, models=models) as profiling:
        found = profiling.run(
            options, lambda _stage, done, total: progress("Profiling the device", done, total)
        )
    return any(
        isinstance(key, LinearKey) and key.point.is_ffn and not record.failed
        for key, record in found.profile.records.items()
    )


def _measured(
    models: Mapping[str, Path], device: str, levels: tuple[str, ...], sync: str, progress: Progress
) -> Iterator[DemoWorkload]:
    from heterollm.benchmarks.cases import cases_of, expand, with_baseline
    from heterollm.benchmarks.options import BenchOptions
    from heterollm.benchmarks.run import run_bench
    from heterollm.benchmarks.verdict import verdicts

    configurations = with_baseline(expand(levels=levels, syncs=(sync,), device=device))
    cases = cases_of((PREFILL_TOKENS,), (DECODE_TOKENS,))
    for name, folder in models.items():

        def report(stage: str, done: int, total: int, name: str = name) -> None:
            progress(f"{stage}, {name}", done, total)

        options = BenchOptions(folder, configurations, cases, REPETITIONS)
        bench = run_bench(options, progress=report)
        yield DemoWorkload(name, bench, tuple(verdicts(bench.rows)))


def write_layer_checkpoint(folder: Path) -> None:
    """Write a checkpoint of one TinyLlama-sized layer with random weights and the bundled tokenizer.

    Raises:
        OSError: The folder cannot be written.
    """
    generator = np.random.default_rng(0)
    hidden, wide = LAYER_CONFIG["hidden_size"], LAYER_CONFIG["intermediate_size"]
    queries = LAYER_CONFIG["num_attention_heads"] * LAYER_CONFIG["head_dim"]
    keys = LAYER_CONFIG["num_key_value_heads"] * LAYER_CONFIG["head_dim"]
    shapes = {
        "model.embed_tokens.weight": (LAYER_CONFIG["vocab_size"], hidden),
        "model.layers.0.self_attn.q_proj.weight": (queries, hidden),
        "model.layers.0.self_attn.k_proj.weight": (keys, hidden),
        "model.layers.0.self_attn.v_proj.weight": (keys, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, queries),
        "model.layers.0.mlp.gate_proj.weight": (wide, hidden),
        "model.layers.0.mlp.up_proj.weight": (wide, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, wide),
    }
    tensors = {
        name: (generator.standard_normal(shape, np.float32) * np.float32(0.02)).astype(np.float16)
        for name, shape in shapes.items()
    }
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{name}.weight"] = np.ones(hidden, np.float16)
    (folder / "config.json").write_text(json.dumps(LAYER_CONFIG), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_model() / name, folder / name)
