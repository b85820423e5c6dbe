"""Tables of simulated rows: the phone's rates, what-ifs, and the steps of the techniques."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, Final

import conclusions
import process_domains
import what_if
from rungs import RungRequest
from simulated_rows import Simulated

from tables.table import Lines, Row, having, last, rows_of, table, values_of

SOCS: Final = {"snapdragon-8gen3-paper": "paper", "snapdragon-8gen3": "own path"}

# -- the README and docs/simulation.md -----------------------------------------------------------------


def simulated(level: str, prompt: int, **asked: object) -> Row:
    """Return a row of Llama-3-8B under the paper's conditions."""
    plain = {"sync": "predict", "resolve": False, "every_form": False, "left_out": [], "gpu_load": None}
    found = {"model": "llama-3-8b", "plan_level": level, "prompt_tokens": prompt, "length_policy": "padding"}
    return last("simulated_paper", **{**found, **plain, **asked})


def fitting(file: str, **asked: object) -> Row:
    """Return a row; one without limits of memory if the phone refuses it."""
    row = last(file, **asked, what_if={})
    return last(file, **asked, what_if=what_if.NO_LIMITS) if row["error"] else row


def refused(row: Row) -> bool:
    """Whether the modelled phone refuses the plan of a row, which was taken without limits of memory."""
    return dict(row["what_if"]) == what_if.NO_LIMITS


@table(
    "simulation",
    "what-ifs",
    "simulated, one change after the other | prefill 256, alone | decode, alone "
    "| prefill 256, with those above | decode, with those above",
)
def what_ifs() -> Lines:
    """Yield the worth of each change to this program's path."""
    return what_if.what_if_table([Simulated(**row) for row in rows_of("simulated_path")])


@table(
    "simulation-tables",
    "process domains",
    "simulated | process domains | graphs on the NPU, GiB | prefill of 512, tokens/s | decode, tokens/s",
)
def domains() -> Lines:
    """Yield models that exceed one process domain, with one and with two."""
    for asked, count in process_domains.cases():
        found = {"model": asked.model, "soc": asked.soc, "plan_level": asked.level}
        row = last("process_domains", **found, what_if=dict(asked.overrides))
        name = f"{asked.model}, {' '.join((f'`{asked.level}`', *asked.techniques))}, {asked.soc}"
        name += ", inputs and outputs once" if process_domains.ONCE.items() <= asked.overrides.items() else ""
        needed = re.search("graphs of ([0-9.]+) GiB", row["error"] or "")
        if needed is not None:
            cells = f"{needed[1]}, refused", "", ""
        else:
            rates = row["prefill_tokens_per_second"], row["decode_tokens_per_second"]
            cells = (f"{row['npu_gib']:.1f}", f"{rates[0]:.0f}", f"{rates[1]:.1f}")
        yield name, str(count), *cells


FLOWN: Final = tuple(product(SOCS, (1024, 2048)))


@table(
    "chunks-in-flight",
    "chunks in flight",
    " | ".join(("simulated", *(f"{SOCS[soc]}: {n}, one by one | four at once" for soc, n in FLOWN))),
)
def flights() -> Lines:
    """Yield prompts in chunks one after the other, and with four at once."""
    for model, level in product(("qwen1.5-1.8b", "llama-3.2-3b", "llama-3-8b"), ("tensor", "block")):
        cells = [f"{model}, `{level}`"]
        for soc, prompt in FLOWN:
            asked = {"model": model, "plan_level": level, "soc": soc, "prompt_tokens": prompt}
            alone, flown = (
                last("simulated_flights", **asked, in_flight=count)["prefill_tokens_per_second"]
                for count in (1, 4)
            )
            cells += [f"{alone:.0f}", f"{flown:.0f} ({flown / alone:.2f})"]
        yield cells


# -- guesses -------------------------------------------------------------------------------------------

LENGTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
ACCEPTED: Final = (0.3, 0.5, 0.7, 0.8, 0.9)


@table(
    "speculative",
    "passes of several tokens",
    f"simulated, tokens of the pass | {' | '.join(map(str, LENGTHS))}",
)
def guessed_passes() -> Lines:
    """Yield decode passes of several tokens under each plan level."""
    for level in ("gpu", "tensor", "block"):
        found = [last("speculation_simulated", kind="pass", level=level, tokens=tokens) for tokens in LENGTHS]
        yield (f"`{level}`, ms", *(f"{row['ms']:.0f}" for row in found))
        yield ("predicted", *(f"{row['predicted_ms']:.0f}" for row in found))
        yield ("runs graphs", *("yes" if row["npu"] else "no" for row in found))


@table(
    "speculative",
    "simulated gains of guesses",
    " | ".join(("simulated | plain, tokens/s", *(f"{share:.0%} right" for share in ACCEPTED))),
)
def guesses() -> Lines:
    """Yield gains of guesses by their assumed acceptance."""
    for by, level in product(("lookup", "llama-3.2-1b"), ("gpu", "tensor", "block")):
        asked = {"kind": "gain", "guesses_by": by, "level": level}
        found = [last("speculation_simulated", **asked, assumed_acceptance=share) for share in ACCEPTED]
        plain = f"{found[0]['plain_tokens_per_s']:.2f}"
        yield (f"{by}, `{level}`", plain, *(f"{row['gain']:.2f} ({row['guesses']})" for row in found))


# -- llm.npu -------------------------------------------------------------------------------------------

NPU_MODELS: Final = tuple(
    product(("qwen1.5-1.8b", "gemma-2b", "phi-2", "llama-2-7b", "mistral-7b"), SOCS.items())
)
NPU_PROMPTS: Final = (64, 256, 512, 1024, 1500)
NPU_STEPS: Final = ("llm.npu:naive", "llm.npu:chunks", "llm.npu:shadow", "llm.npu")


def _npu(model: str, soc: str, prompt: int, *techniques: str, **asked: object) -> Row:
    wanted = {"plan_level": "layer", "pruned": 0.85, "techniques": list(techniques)} | asked
    return fitting("simulated_llm_npu", **wanted, model=model, soc=soc, prompt_tokens=prompt)


def _npu_rate(row: Row) -> str:
    return f"{row['prefill_tokens_per_second']:.0f}{'†' if refused(row) else ''}"


@table(
    "llm-npu-tables",
    "llm.npu, steps",
    "simulated, 1024 tokens, tokens/s (NPU idle; J) | `layer`, W4A16 | naive | chunks | with shadows "
    "| out of order",
)
def npu_steps() -> Lines:
    """Yield the steps of the technique."""
    for model, (soc, words) in NPU_MODELS:
        rows = [_npu(model, soc, 1024, *techniques) for techniques in ((), *((name,) for name in NPU_STEPS))]
        idle = (row["prefill"]["npu_idle_fraction"] for row in rows)
        cells = (
            f"{_npu_rate(row)} ({share:.0%}; {row['prefill_joules']:.1f})"
            for row, share in zip(rows, idle, strict=True)
        )
        yield f"{model}, {words}", *cells


@table(
    "llm-npu-tables",
    "llm.npu, lengths",
    f"simulated, llm.npu, tokens/s (J) | {' | '.join(map(str, NPU_PROMPTS))}",
)
def npu_lengths() -> Lines:
    """Yield lengths of prompts."""
    for model, (soc, words) in NPU_MODELS:
        found = [_npu(model, soc, prompt, "llm.npu") for prompt in NPU_PROMPTS]
        yield f"{model}, {words}", *(f"{_npu_rate(row)} ({row['prefill_joules']:.2f})" for row in found)


@table(
    "llm-npu-tables",
    "llm.npu, splits",
    "simulated, tokens/s | 256: `tensor`, W4A16 | llm.npu | `tensor` and llm.npu "
    "| 1024: `tensor`, W4A16 | llm.npu | `tensor` and llm.npu",
)
def npu_splits() -> Lines:
    """Yield the technique beside, and with, splits."""
    for model, (soc, words) in NPU_MODELS:
        found = (
            _npu(model, soc, prompt, *techniques, plan_level=level)
            for prompt in (256, 1024)
            for level, *techniques in (("tensor",), ("layer", "llm.npu"), ("tensor", "llm.npu"))
        )
        yield f"{model}, {words}", *map(_npu_rate, found)


@table("llm-npu-tables", "llm.npu, published", "what | published | simulated, paper | simulated, own path")
def npu_published() -> Lines:
    """Yield the paper's numbers."""

    def qwen(soc: str, prompt: int, step: str, **asked: object) -> Row:
        return _npu("qwen1.5-1.8b", soc, prompt, step, **asked)

    def npu_ms(soc: str) -> str:
        phase = qwen(soc, 256, "llm.npu:shadow")["prefill"]
        return f"{phase['busy_fraction']['npu'] * phase['milliseconds']:.0f} ms"

    def build_s(soc: str) -> str:
        naive, chunks = (_npu("gemma-2b", soc, 256, step)["ttft_ms"] for step in NPU_STEPS[:2])
        return f"{(naive - chunks) / 1e3:.1f} s"

    def idle(soc: str, step: str) -> str:
        return f"{qwen(soc, 1024, step)['prefill']['npu_idle_fraction']:.0%}"

    def shadow(soc: str, field: str) -> str:
        every, none = qwen(soc, 256, "llm.npu:shadow", pruned=0.0), qwen(soc, 256, "llm.npu:chunks")
        return f"{1 - none[field] / every[field]:.1%}"

    def best(soc: str) -> str:
        return f"{max(qwen(soc, n, 'llm.npu')['prefill_tokens_per_second'] for n in NPU_PROMPTS):.0f}"

    kinds: tuple[tuple[str, str, Callable[[str], str]], ...] = (
        ("Qwen1.5-1.8B, tokens/s at the best length", "more than 1000", best),
        ("Qwen1.5-1.8B, 256 tokens, NPU's time", "315 ms", npu_ms),
        ("NPU idle in order (Qwen1.5-1.8B, 1024 tokens)", "37 %", lambda soc: idle(soc, "llm.npu:shadow")),
        ("the same out of order", "not stated", lambda soc: idle(soc, "llm.npu")),
        (
            "Qwen1.5-1.8B, share of the time that shadows without pruning take",
            "29.7 % to synchronise",
            lambda soc: shadow(soc, "ttft_ms"),
        ),
        ("the same, of the energy", "20.1 %", lambda soc: shadow(soc, "prefill_joules")),
        ("Gemma-2B, building graphs for a prompt", "11.9 s", build_s),
    )
    for what, stated, value in kinds:
        yield what, stated, *map(value, SOCS)


# -- shadowAttn ----------------------------------------------------------------------------------------

LONG_PROMPTS: Final = (1024, 2048, 4096, 8192)
QWENS: Final = ("qwen2-0.5b", "qwen2-1.5b", "qwen1.5-1.8b")
SLOW: Final = {"gpu.attention_tflops": 0.02}
"""The GPU's arithmetic of attention at a tenth: little of the processor is left, as in the paper."""


def _attention(
    model: str,
    prompt: int,
    changed: Mapping[str, float],
    estimator: str | None,
    pipeline: str = "ordered",
    *,
    keep_by: str = "mass",
    buckets: int = 1,
    imbalance: float | None = None,
) -> Row:
    asked: dict[str, Any] = {"techniques": [], "attention": None}
    if estimator is not None:
        attention = {
            "keep": 0.2,
            "keep_by": keep_by,
            "buckets": buckets,
            "estimator": estimator,
            "pipeline": pipeline,
        }
        asked = {"techniques": ["shadowattn"], "attention": attention}
    asked["head_imbalance"] = imbalance
    file = "simulated_shadow_attention"
    return last(file, model=model, prompt_tokens=prompt, what_if=dict(changed), **asked)


@table(
    "shadow-attention",
    "simulated lengths",
    " | ".join(
        (
            "simulated prefill, s (attention's share; J)",
            *(f"{prompt}: dense | `shadowattn`" for prompt in LONG_PROMPTS),
        )
    ),
)
def attention_lengths() -> Lines:
    """Yield attention's share by length."""
    cases: tuple[tuple[str, dict[str, float]], ...] = (("GPU as modelled", {}), ("a tenth of the GPU", SLOW))
    for (words, changed), model in product(cases, QWENS):
        cells = [f"{model}, {words}"]
        for prompt, estimator in product(LONG_PROMPTS, (None, "auto")):
            row = _attention(model, prompt, changed, estimator)
            share = row["prefill"]["attention_ms"] / row["ttft_ms"]
            cells.append(f"{row['ttft_ms'] / 1e3:.2f} ({share:.0%}; {row['prefill_joules']:.1f})")
        yield cells


@table(
    "shadow-attention",
    "simulated steps",
    "simulated, 4096 tokens, a tenth of the GPU | prefill, s | attention, s | J | NPU idle",
)
def attention_steps() -> Lines:
    """Yield the steps of the technique."""
    steps = (
        ("dense", None, ""),
        ("sparse, the GPU estimates", "gpu", "ordered"),
        ("the NPU estimates, a head a launch", "npu", "heads"),
        ("fused heads", "npu", "fused"),
        ("fused as far as it pays, in order", "npu", "ordered"),
    )
    for model, (words, estimator, pipeline) in product(QWENS[1:], steps):
        row = _attention(model, 4096, SLOW, estimator, pipeline)
        times_ms = row["ttft_ms"], row["prefill"]["attention_ms"]
        seconds = (f"{time_ms / 1e3:.2f}" for time_ms in times_ms)
        idle = f"{row['prefill']['npu_idle_fraction']:.0%}"
        yield f"{model}: {words}", *seconds, f"{row['prefill_joules']:.1f}", idle


@table(
    "shadow-attention",
    "simulated heads",
    "simulated, 4096 tokens, a tenth of the GPU, assumed heads | "
    + " | ".join(f"{model}: prefill, s | attention, s | NPU idle" for model in QWENS[1:]),
)
def unequal_heads() -> Lines:
    """Yield the paper's ablation with heads that differ."""
    mapped = {"memory.fine_grained_svm": 0}
    steps: tuple[tuple[str, dict[str, Any]], ...] = (
        ("all of it: fused as far as it pays, in order", {}),
        ("no overlap: the GPU begins behind all graphs of a layer", {"more": mapped}),
        ("a head a launch, in the order of heads", {"pipeline": "heads"}),
        ("fused heads, in the order of heads", {"pipeline": "fused"}),
        ("nine buckets of scales", {"buckets": 9}),
        ("one ratio", {"keep_by": "uniform"}),
        ("ratios by importance", {"keep_by": "importance"}),
        ("imbalance 4: all of it", {"imbalance": 4.0}),
        ("imbalance 4: a head a launch, in the order of heads", {"imbalance": 4.0, "pipeline": "heads"}),
    )
    for words, asked in steps:
        options = {"imbalance": 2.0, **asked}
        changed = {**SLOW, **options.pop("more", {})}
        cells = [words]
        for model in QWENS[1:]:
            row = _attention(model, 4096, changed, "npu", **options)
            cells += [f"{one / 1e3:.2f}" for one in (row["ttft_ms"], row["prefill"]["attention_ms"])]
            cells.append(f"{row['prefill']['npu_idle_fraction']:.0%}")
        yield cells


# -- profiles ------------------------------------------------------------------------------------------

TIME_MODELS: Final = ("stage_linear", "tree", "interpolation", "boosted trees", "Gaussian process")


@table(
    "profile",
    "regret by budget",
    "simulated device, budget, s | spent, s | points of the NPU | "
    + " | ".join(name.replace("_", "-") for name in TIME_MODELS),
)
def regret_by_budget() -> Lines:
    """Yield regrets by device, budget and model of the NPU's times; a star for the model in use."""
    rows = having("regret_by_budget")
    for soc, budget in values_of(rows, "soc", "budget_s"):
        own = [last(rows, soc=soc, budget_s=budget, npu_model=name) for name in TIME_MODELS]
        cells = (
            f"{row['regret']:.1%}, {row['unseen_regret']:.1%}{' *' if row['used'] else ''}" for row in own
        )
        budgeted = "`--quick`" if budget == "quick" else f"{budget}"
        yield f"{soc}, {budgeted}", f"{own[0]['spent_s']:.0f}", f"{own[0]['npu_points']}", *cells


# -- NPUMoE --------------------------------------------------------------------------------------------
# ``python bench/figures.py --run simulated_experts`` takes the rows again; bench/rungs.py has the steps.
# A case that does not fit is a row with the reason.

MOE_PROMPTS: Final = (64, 256, 1024)
MOE_STEPS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("all on the GPU", "gpu", ()),
    ("linear layers split", "tensor", ()),
    ("experts on the NPU, a graph each", "tensor", ("npumoe:each",)),
    ("tiers of capacity", "tensor", ("npumoe:tiers",)),
    ("groups", "tensor", ("npumoe:groups",)),
    ("the solver's choice", "tensor", ("npumoe",)),
)
FIT: Final = ("qwen3-30b-a3b", "olmoe-1b-7b")
TOO_LARGE: Final = ("phi-3.5-moe", "mixtral-8x7b")
"""Mixtures whose weights exceed the phone's memory."""

PHONE: Final = {"memory.available_gib": 20.0}
"""A phone with 24 GB, of which Android and other programs keep 4. One with 16 GB cannot hold Qwen3-30B."""

MORE_MEMORY: Final = {"memory.available_gib": 0.0}
IMBALANCES: Final = (1.3, None, 2.7, 4.0)
"""None is the default."""

STEP_HEAD: Final = (
    "simulated, assumed loads | prefill of 64, tokens/s | 256 | 1024 | 1024 tokens: J "
    "| graphs of experts, GiB | graphs a layer | padding | overflow | choices on the NPU | decode, tokens/s"
)


@table("mixture-of-experts", "simulated steps", STEP_HEAD)
def moe_phone() -> Lines:
    """Yield the steps on the phone; those of mixtures that it cannot hold, with more memory."""
    yield from (_moe_line(model, step, PHONE) for model in FIT for step in MOE_STEPS)
    for model in TOO_LARGE:
        yield _moe_line(model, MOE_STEPS[0], PHONE)
        for step in (MOE_STEPS[1], MOE_STEPS[-1]):
            name, *cells = _moe_line(model, step, MORE_MEMORY)
            yield f"{name}, with more memory", *cells


@table("mixture-of-experts", "simulated steps, unlimited", STEP_HEAD)
def moe_unlimited() -> Lines:
    """Yield the steps with memory, and an NPU's address space, for everything."""
    limits = MORE_MEMORY | {"npu.address_space_gib": 0.0}
    return (_moe_line(model, step, limits) for model in (*FIT, *TOO_LARGE) for step in MOE_STEPS)


@table(
    "mixture-of-experts",
    "simulated imbalance",
    "simulated, 1024 tokens, tokens/s with the technique (without it; choices on the NPU) | "
    + " | ".join("2, the default" if own is None else f"{own:g}" for own in IMBALANCES),
)
def moe_imbalances() -> Lines:
    """Yield rates by imbalance."""
    for model in FIT:
        cells = [model]
        for imbalance in IMBALANCES:
            asked = {"model": model, "prompt_tokens": 1024, "plan_level": "tensor", "what_if": PHONE}
            without, found = (
                last("simulated_experts", **asked, techniques=techniques, imbalance=imbalance)
                for techniques in ([], ["npumoe"])
            )
            share = f"{found['experts']['npu_pairs'] / found['experts']['pairs']:.0%}"
            cells.append(f"{_moe_rate(found)} ({_moe_rate(without)}; {share})")
        yield cells


def _moe_line(
    model: str, step: tuple[str, str, tuple[str, ...]], changed: Mapping[str, float]
) -> Iterator[str]:
    """Yield the cells of a line; a length that does not fit has the sum in place of its rate."""
    words, level, techniques = step
    asked = {"plan_level": level, "techniques": list(techniques), "what_if": changed, "imbalance": None}
    found = [last("simulated_experts", model=model, prompt_tokens=n, **asked) for n in MOE_PROMPTS]
    row = found[-1]
    yield from (f"{model}: {words}", *map(_moe_rate, found))
    if row["error"] is not None:
        yield from [""] * 7
        return
    yield f"{row['prefill_joules']:.1f}"
    experts = row["experts"]
    if experts["npu_rows"]:
        yield from (f"{experts[name]:.1f}" for name in ("npu_gib", "graphs_per_layer"))
        yield from (f"{experts['padding_share']:.0%}", f"{experts['overflow_share']:.1%}")
        yield f"{experts['npu_pairs'] / experts['pairs']:.0%}"
    else:
        yield from [""] * 5
    yield f"{row['decode_tokens_per_second']:.1f}"


def _moe_rate(row: Row) -> str:
    """Return a rate, or the sum of a refusal: what is needed, and what there is."""
    error = row["error"]
    if error is None:
        return f"{row['prefill_tokens_per_second']:.1f}"
    needed, limit = re.findall(r"(?:takes|graphs of|can have|leave) (\d+\.\d+) GiB", error)
    return f"{needed} > {limit} GiB"


# -- conclusions ---------------------------------------------------------------------------------------


def asked_row(request: RungRequest) -> Row:
    """Return the row of a request of bench/conclusions.py."""
    return last(
        conclusions.FILE,
        model=request.model,
        soc=request.soc,
        prompt_tokens=request.prompt,
        plan_level=request.level,
        techniques=[request.rung] if request.rung else list(request.techniques),
        what_if=dict(request.overrides),
        pruned=request.pruned,
        gpu_load=None if request.load is None else str(request.load),
        gpu_share=request.gpu_share,
    )


def swept_numbers(one: conclusions.Conclusion) -> list[float]:
    """Return the numbers of a conclusion by swept value."""
    every = ({name: asked_row(own) for name, own in one.requests(value).items()} for value in one.swept)
    return [one.number(rows) for rows in every]


@table(
    "paper-map",
    "conclusions",
    "conclusion | published | simulated, as modelled | the paper's assumption, with its source "
    "| simulated, with it | turns at",
    "lrrl",
)
def conclusions_table() -> Lines:
    """Yield each conclusion, and the value of the parameter at which it turns."""
    for one in conclusions.CONCLUSIONS:
        numbers = swept_numbers(one)
        turn = one.turn(numbers)
        first, last_value = one.swept[0], one.swept[-1]
        words = (
            f"`{one.parameter}` {first:g} to {last_value:g}" if one.parameter else f"{first} to {last_value}"
        )
        yield (
            *(one.words, one.published, f"{numbers[0]:.2f}", f"{words}: {one.source}"),
            *(f"{numbers[-1]:.2f}", "" if turn is None else f"{turn:.3g}"),
        )


@table(
    "mixture-of-experts",
    "simulated steps, Apple",
    "simulated, M2 Ultra, 1024 tokens, assumed loads | tokens/s | J | graphs a layer | padding "
    "| choices on the NPU",
)
def moe_apple() -> Lines:
    """Yield NPUMoE's steps on the machine that it was measured on."""
    words = {(level, rung): words for words, level, rung in conclusions.APPLE_STEPS}
    for request in conclusions.apple_requests():
        row = asked_row(request)
        use, shares = row["experts"], [""] * 3
        if use["npu_rows"]:
            share = use["npu_pairs"] / use["pairs"]
            shares = [f"{use['graphs_per_layer']:.1f}", f"{use['padding_share']:.0%}", f"{share:.0%}"]
        rates = f"{row['prefill_tokens_per_second']:.0f}", f"{row['prefill_joules']:.1f}"
        name = words[request.level, request.rung or "".join(request.techniques)]
        yield f"{request.model}: {name}", *rates, *shares
