"""The demonstration: text from the bundled model, and what each plan level costs on this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
from safetensors.numpy import save_file

from heterollm.errors import CacheError
from heterollm.kernels.npu import TimeKind
from heterollm.kernels.ops import Phase
from heterollm.llm import LLM
from heterollm.profiler.measure import Measurement, measure_interleaved
from heterollm.progress import Progress, silent
from heterollm.session import Session
from heterollm.solver import LEVELS, PlanLevel

if TYPE_CHECKING:
    from heterollm.load_options import Sync

__all__ = ["Comparison", "DemoResult", "bundled_model", "run_demo", "write_layer_checkpoint"]

PROMPT: Final = "import os\n\ndef read_lines(path):\n"
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 3
"""For the text that is shown: greedy text of so small a model goes in circles."""
PREFILL_TOKENS: Final = 256
CONTEXT: Final = 512
REPEATS: Final = 5
MIN_TIME_S: Final = 1.0

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
    # So few words that the head, which a single layer of a real model has not, hardly counts.
    "vocab_size": 256,
}
"""One layer of TinyLlama-1.1B (https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0)."""

USES_NPU: Final[Mapping[Phase, tuple[PlanLevel, ...]]] = {"prefill": ("npu", "layer"), "decode": ("npu",)}
"""Levels that send work to the NPU, by phase."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plan levels on one workload, measured in turns in one process.

    Args:
        workload: What ran.
        phase: ``prefill`` or ``decode``.
        tokens: Tokens of one run.
        measurements: Times by level, ``gpu`` among them.
    """

    workload: str
    phase: Phase
    tokens: int
    measurements: Mapping[PlanLevel, Measurement]

    def rate(self, level: PlanLevel) -> float:
        """Return tokens a second at the median."""
        return self.tokens / self.measurements[level].median_us * 1e6

    def speedup(self, level: PlanLevel) -> float:
        """Return how many times as fast as ``gpu`` a level is, by medians."""
        return self.measurements["gpu"].median_us / self.measurements[level].median_us

    def verdict(self) -> str:
        """Say in words whether the NPU pays here, from the numbers alone."""
        where = f"{self.workload}, {self.phase}"
        best: PlanLevel = max(USES_NPU[self.phase], key=self.rate)
        gain = self.speedup(best)
        gpu, npu = self.measurements["gpu"], self.measurements[best]
        faster, slower = (npu, gpu) if gain > 1.0 else (gpu, npu)
        if faster.quartiles_us[1] >= slower.quartiles_us[0]:
            return f"{where}: no clear difference between gpu and {best}; their quartiles overlap."
        if gain > 1.0:
            return f"{where}: the NPU pays; {best} is fastest, {gain:.2f} times as fast as gpu."
        return f"{where}: the NPU does not pay; gpu is {1 / gain:.2f} times as fast as {best}."

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return {
            "workload": self.workload,
            "phase": self.phase,
            "tokens": self.tokens,
            "levels": {
                level: {"tokens_per_s": self.rate(level), **measurement.to_dict()}
                for level, measurement in self.measurements.items()
            },
            "verdict": self.verdict(),
        }


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demonstration found.

    Args:
        prompt: What the bundled model was given.
        text: What it wrote.
        levels_agree: Whether all levels wrote the same when each took its likeliest tokens.
        device: The device as it describes itself.
        time: Whether its times are real.
        comparisons: One for each workload and phase; empty where time means nothing.
        notes: What to know about the numbers.
    """

    prompt: str
    text: str
    levels_agree: bool
    device: Mapping[str, Any]
    time: TimeKind
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "levels_agree": self.levels_agree,
            "device": dict(self.device),
            "time": self.time,
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
            "notes": list(self.notes),
        }


def bundled_model() -> Path:
    """Return the folder of the model that comes with the package."""
    return Path(str(resources.files("heterollm.data.tiny_python_lm")))


def run_demo(
    *,
    device: str = "auto",
    max_new_tokens: int = 64,
    sync: str = "auto",
    on_text: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> DemoResult:
    """Generate with the bundled model at every plan level, then measure the levels in turns.

    Args:
        device: Name of the device, or ``auto``.
        max_new_tokens: Length of the text.
        sync: How the parts wait for each other; see :meth:`heterollm.LLM.load`.
        on_text: Receives the text of level ``gpu`` as it is made.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        HeteroLLMError: The device cannot be opened, or an option is not legal.
    """
    report = progress or silent
    comparisons: list[Comparison] = []
    with ExitStack() as stack:
        models = _load_levels(stack, bundled_model(), device, sync, report)
        answer = models["gpu"].stream(
            PROMPT, max_new_tokens=max_new_tokens, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED
        )
        for step in answer:
            if on_text is not None:
                on_text(step.text)
        texts = {models[level].generate(PROMPT, max_new_tokens=max_new_tokens).text for level in LEVELS}
        opened = models["gpu"].device
        description, time_kind = opened.description(), opened.time_kind
        reason = (f"Device auto chose {opened.name}: {opened.reason}",) if opened.reason else ()
        if time_kind == "real":
            comparisons += _compare(BUNDLED, models, report)
    if time_kind != "real":
        notes: tuple[str, ...] = (f"No speeds: times on {opened.name} are {time_kind}.",)
    else:
        comparisons += _compare_layer(opened.name, sync, report)
        notes = _notes(str(opened.split))
    return DemoResult(
        PROMPT,
        answer.result.text,
        len(texts) == 1,
        description,
        time_kind,
        tuple(comparisons),
        (*reason, *notes),
    )


def _notes(split: str) -> tuple[str, ...]:
    return (
        f"Every level has the same threads, {split}: gpu leaves the NPU part's idle.",
        "gpu: all on the GPU part. npu: every linear on the NPU part, the rest on the GPU part. layer: the "
        "linears of prefill on the NPU part, the rest on the GPU part. None cuts an operator, so the parts "
        "take turns and never work at the same time.",
    )


def _load_levels(
    stack: ExitStack, model: Path, device: str, sync: str, progress: Progress
) -> dict[PlanLevel, LLM]:
    levels: tuple[PlanLevel, ...] = LEVELS
    return {
        level: stack.enter_context(
            LLM.load(
                model, device=device, plan=level, context=CONTEXT, sync=cast("Sync", sync), progress=progress
            )
        )
        for level in levels
    }


def _compare_layer(device: str, sync: str, progress: Progress) -> Iterator[Comparison]:
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heterollm-demo-")))
            progress("Writing a layer of random weights", 0, 1)
            write_layer_checkpoint(folder)
            progress("Writing a layer of random weights", 1, 1)
        except OSError as error:
            raise CacheError(
                f"Cannot write a layer of weights into {tempfile.gettempdir()}: {error.strerror or error}.",
                fix="Free 100 MB there, or set TMPDIR to another folder.",
            ) from error
        models = _load_levels(stack, folder, device, sync, progress)
        yield from _compare(LAYER, models, progress)


def _compare(workload: str, models: Mapping[PlanLevel, LLM], progress: Progress) -> Iterator[Comparison]:
    """Measure prefill, then decode right behind it; random tokens, since some emulators skip zeros."""
    vocabulary = models["gpu"].config.vocab_size
    ids = np.random.default_rng(0).integers(1, vocabulary, PREFILL_TOKENS).tolist()
    sessions = {level: model.session() for level, model in models.items()}
    workloads: tuple[tuple[Phase, int, _MakeCall], ...] = (
        ("prefill", PREFILL_TOKENS, _prefill_call),
        ("decode", 1, _decode_call),
    )
    for phase, tokens, make in workloads:
        calls = {level: make(session, ids) for level, session in sessions.items()}
        stage = partial(progress, f"Measuring {phase}, {workload}")
        measured = measure_interleaved(
            calls,
            repeats=REPEATS,
            min_time_s=MIN_TIME_S,
            progress=stage,
        )
        yield Comparison(workload, phase, tokens, measured)


_MakeCall: TypeAlias = Callable[[Session, Sequence[int]], Callable[[], object]]


def _prefill_call(session: Session, ids: Sequence[int]) -> Callable[[], object]:
    def call() -> None:
        session.reset()
        session.prefill(ids)

    return call


def _decode_call(session: Session, ids: Sequence[int]) -> Callable[[], object]:
    def call() -> None:
        if session.position == session.context:
            session.truncate(len(ids))
        session.decode(ids[session.position % len(ids)])

    return call


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
