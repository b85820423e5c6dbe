"""The demonstration: text, then GPU, NPU and both on this machine, then the same on a modelled phone."""

from __future__ import annotations

import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from safetensors.numpy import save_file

from heterollm.base import CacheError, HeteroLLMError, Progress, scratch_folder, silent
from heterollm.benchmarks.significance import Verdict
from heterollm.data import bundled_model
from heterollm.kernels.devices import shares_cores
from heterollm.kernels.npu import TimeKind
from heterollm.kernels.sim import SIMULATED, is_simulated
from heterollm.llm import LLM
from heterollm.model import Checkpoint

if TYPE_CHECKING:
    from heterollm.benchmarks.rows import BenchRow
    from heterollm.engine import Sync

PROMPT: Final = "import os\n\ndef read_lines(path):\n"
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 3
"""Sampling of the shown text: greedy text of a small model repeats itself."""
PREFILL_TOKENS: Final = 256
DECODE_TOKENS: Final = 32
CONTEXT: Final = 512
REPETITIONS: Final = 3
PROFILE_BUDGET_S: Final = 8.0
"""Enough for the points without which nothing can be planned, which are measured past any budget."""

ROWS: Final = {"gpu": "GPU", "npu": "NPU", "tensor": "both"}
"""Names of the three rows by the plan level that runs them."""

PAYS: Final[Mapping[Verdict, str]] = {
    "faster": "splitting pays",
    "slower": "splitting does not pay",
    "noise": "splitting makes no clear difference",
    "too few samples": "too few samples to tell whether splitting pays",
}

PHONE: Final = "snapdragon-8gen3"
PHONE_MODEL: Final = "llama-3-8b"
ANY_MEMORY: Final = {"memory.available_gib": 0.0}
NO_LIMITS: Final = {**ANY_MEMORY, "npu.address_space_gib": 0.0}
"""The NPU's row needs more than the phone has, and than its NPU addresses; a note says so."""


LAYER: Final = "TinyLlama layer"
VALUES: Final = 1_000_003
"""Different weights of the layer: a prime, so that no two rows are alike."""
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


@dataclass(frozen=True, slots=True)
class DemoRow:
    """Rates of one row in tokens a second; None where nothing could be measured.

    Args:
        processors: ``GPU``, ``NPU`` or ``both``.
        prefill: Rate of a prompt of :data:`PREFILL_TOKENS` tokens.
        decode: Rate of the tokens after it.
    """

    processors: str
    prefill: float | None
    decode: float | None


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of the demonstration.

    Args:
        prompt: Prompt of the bundled model.
        text: Its answer.
        parameters: Weights of the bundled model.
        same_text: Whether GPU and NPU write the same text from the likeliest tokens.
        device: Description of the device.
        time: Kind of its times.
        measured: Rates on this machine; empty if its times are not real.
        sentences: When splitting pays, by these rates.
        phone: Name of the simulated device.
        phone_model: Model of the simulated rates.
        simulated: Simulated rates.
        notes: Remarks on the numbers.
    """

    prompt: str
    text: str
    parameters: int
    same_text: bool
    device: Mapping[str, Any]
    time: TimeKind
    measured: tuple[DemoRow, ...]
    sentences: tuple[str, ...]
    phone: str
    phone_model: str
    simulated: tuple[DemoRow, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return asdict(self)


def run_demo(
    *,
    device: str = "auto",
    max_new_tokens: int = 64,
    sync: str = "auto",
    on_start: Callable[[Mapping[str, Any], int], None] | None = None,
    on_text: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> DemoResult:
    """Generate with the bundled model, measure GPU, NPU and both, and simulate them on a phone.

    Args:
        device: Name of the device, or ``auto``; a simulated one is the phone, and nothing is measured.
        max_new_tokens: Length of the text.
        sync: How the processors wait for each other; see :meth:`heterollm.LLM.load`.
        on_start: Receives the description of the device and the bundled model's number of weights.
        on_text: Receives the text piece by piece.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        HeteroLLMError: The device cannot be opened, or an option is not legal.
    """
    report = progress or silent
    checkpoint = Checkpoint(bundled_model())
    parameters = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names)
    load = partial(
        LLM.load, bundled_model(), device=device, sync=cast("Sync", sync), context=CONTEXT, progress=report
    )
    with load(plan="gpu") as model:
        opened = model.device
        description, time_kind, name = opened.description(), opened.time_kind, opened.name
        if on_start is not None:
            on_start(description, parameters)
        answer = model.stream(
            PROMPT, max_new_tokens=max_new_tokens, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED
        )
        for step in answer:
            if on_text is not None:
                on_text(step.text)
        on_gpu = model.generate(PROMPT, max_new_tokens=max_new_tokens).text
    with load(plan="npu") as model:
        same = on_gpu == model.generate(PROMPT, max_new_tokens=max_new_tokens).text
    measured: tuple[DemoRow, ...] = ()
    sentences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    phone = device if is_simulated(device) else f"{SIMULATED}{PHONE}"
    # Beside a measurement it shows no progress: two stages at once would take turns on the screen.
    told = silent if time_kind == "real" else report
    simulation = functools.cache(partial(_simulated, phone.removeprefix(SIMULATED), told))
    if time_kind == "real":
        measured, sentences, notes = _measured(name, sync, report, simulation)
    elif time_kind == "emulated":
        notes = (f"No speeds of this machine: times on {name} are emulated.",)
    simulated, more = simulation()
    return DemoResult(
        prompt=PROMPT,
        text=answer.result.text,
        parameters=parameters,
        same_text=same,
        device=description,
        time=time_kind,
        measured=measured,
        sentences=sentences,
        phone=phone,
        phone_model=PHONE_MODEL,
        simulated=simulated,
        notes=(*notes, *more),
    )


def _measured(
    device: str, sync: str, progress: Progress, meanwhile: Callable[[], object]
) -> tuple[tuple[DemoRow, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the rows of this machine, when splitting pays, and notes on failures.

    Args:
        device: Name of the device.
        sync: How the processors wait for each other.
        progress: Called with a stage's name, steps done and steps in all.
        meanwhile: Called while the bench loads the models in other processes, before it measures.
    """
    from heterollm.benchmarks.cases import Configuration, cases_of, expand, with_baseline
    from heterollm.benchmarks.options import BenchOptions
    from heterollm.benchmarks.run import LOADING, run_bench

    configurations = with_baseline(expand(Configuration(device=device, sync=sync), plan_level=tuple(ROWS)))
    cases = cases_of((PREFILL_TOKENS,), (DECODE_TOKENS,))

    def told(stage: str, done: int, total: int) -> None:
        if stage == LOADING and done == total:
            other.result()
        progress(stage, done, total)

    with ExitStack() as stack:
        layer = _layer_folder(stack, progress)
        profile = profile_layer(device, layer, progress)
        options = BenchOptions(layer, configurations, cases, REPETITIONS, trace=False, profile=profile)
        other = stack.enter_context(ThreadPoolExecutor(1)).submit(meanwhile)
        rows = run_bench(options, progress=told).rows
    own = [row for row in rows if not row.asked.baseline]

    def rate(level: str, phase: str) -> float | None:
        found = next(row for row in own if (row.asked.asked_level, row.phase) == (level, phase))
        return found.times.median_ts if found.usable else None

    shown = tuple(
        DemoRow(name, rate(level, "prefill"), rate(level, "decode")) for level, name in ROWS.items()
    )
    failures = dict.fromkeys(f"{row.label}: {row.error}" for row in rows if row.error is not None)
    return shown, tuple(_sentences(rows, device)), tuple(failures)


def _sentences(rows: Sequence[BenchRow], device: str) -> Iterator[str]:
    """Yield whether splitting pays in each phase, and where it does."""
    from heterollm.benchmarks.verdict import best_of, compare_rows, whole_device

    for phase in ("prefill", "decode"):
        usable = [row for row in rows if row.phase == phase and row.usable]
        own = [row for row in usable if not row.asked.baseline]
        single = best_of([row for row in own if row.plan_level != "tensor"])
        both = next((row for row in own if row.plan_level == "tensor"), None)
        if single is None or both is None:
            continue
        change, whole = compare_rows(single, both), whole_device(usable, both)
        text = f"{phase.capitalize()}: both are {change} as fast as the {ROWS[single.plan_level]} alone"
        if whole is not None:
            change = compare_rows(whole, both)
            rate = whole.times.median_ts or 0.0
            text += f", and {change} as fast as the GPU's kernels on the cores of both ({rate:.0f} tokens/s)"
        yield f"{text}: {PAYS[change.verdict]}."
    if shares_cores(device):
        yield (
            "GPU and NPU are cores of one CPU here, and one runtime can use all of them by itself. Splitting "
            "is for hardware with two different processors, such as the phone below."
        )


def _simulated(soc: str, progress: Progress) -> tuple[tuple[DemoRow, ...], tuple[str, ...]]:
    """Return the rows of a modelled phone, and notes on them."""
    from heterollm.benchmarks.sweep import expand_simulated
    from heterollm.simulate import SimulationRequest, simulate

    rows: list[DemoRow] = []
    notes: list[str] = []
    base = SimulationRequest(
        PHONE_MODEL, soc, prompt=PREFILL_TOKENS, decode=DECODE_TOKENS, overrides=ANY_MEMORY
    )
    limit: float | None = None
    for done, request in enumerate(expand_simulated(base, level=tuple(ROWS))):
        progress("Simulating a phone", done, len(ROWS))
        name = ROWS[request.level]
        try:
            found = simulate(replace(request, overrides=NO_LIMITS) if request.level == "npu" else request)
        except HeteroLLMError as error:
            rows.append(DemoRow(name, None, None))
            notes.append(f"{name}, simulated: {error.message}")
            continue
        decode = None if found.decode is None else found.decode.tokens_per_second
        rows.append(DemoRow(name, found.prefill.tokens_per_second, decode))
        held, limit = found.graphs.held_gib, found.graphs.limit_gib or limit  # the row before has the phone's
        if limit is not None and held > limit:
            notes.append(
                f"{name}, simulated: the graphs of all lengths take {held:.1f} GiB, and this phone's NPU "
                f"addresses {limit:g} GiB: a phone would refuse to open them all."
            )
    progress("Simulating a phone", len(ROWS), len(ROWS))
    return tuple(rows), tuple(notes)


def _layer_folder(stack: ExitStack, progress: Progress) -> Path:
    try:
        temporary = stack.enter_context(scratch_folder("heterollm-demo-"))
        folder = temporary / LAYER.replace(" ", "-")  # the profile shows this name
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


def profile_layer(device: str, layer: Path, progress: Progress) -> Path:
    """Measure what a plan for a layer needs, unless an earlier demo has; return the profile's file.

    No other command reads that file: a few seconds on a part of the cores are no base for plans.

    Args:
        device: Name of the device.
        layer: Folder of the checkpoint.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        HeteroLLMError: The device cannot be opened, or the profile not be written.
    """
    from heterollm.planning import ProfilingSession
    from heterollm.profiler import SessionOptions
    from heterollm.profiler.records import DEMO

    options = SessionOptions.of(quick=True, update=True, budget_s=PROFILE_BUDGET_S)
    with ProfilingSession(device, models=(layer,), purpose=DEMO) as profiling:
        if not profiling.finished:
            profiling.run(options, lambda _stage, done, total: progress("Profiling the device", done, total))
    return profiling.path


def write_layer_checkpoint(folder: Path) -> None:
    """Write a checkpoint of one TinyLlama-sized layer with random weights and the bundled tokenizer.

    Raises:
        OSError: The folder cannot be written.
    """
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
    # The same values again and again: new ones for 44 million weights would take a second of each demo.
    values = np.random.default_rng(0).standard_normal(VALUES, np.float32) * np.float32(0.02)
    halves = values.astype(np.float16)
    tensors = {
        name: np.resize(np.roll(halves, place * 1000), shape)
        for place, (name, shape) in enumerate(shapes.items())
    }
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{name}.weight"] = np.ones(hidden, np.float16)
    (folder / "config.json").write_text(json.dumps(LAYER_CONFIG), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_model() / name, folder / name)
