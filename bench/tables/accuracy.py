"""Tables of accuracy: integer activations, sparse attention, experts, and the picture of kept keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import mean, median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.solver.sparse.keep import HeadNeeds, keep_ratios
from tables.table import Lines, Row, having, last, plain_table, rows_of, table, values_of

PUBLISHED: Final = "SmolLM2-135M-Instruct"
BUNDLED: Final = "tiny_python_lm"

# -- forms of a linear ---------------------------------------------------------------------------------

INTEGER_FORMS: Final = {
    "MatMulNBits": "matmul_nbits",
    "static, float edges": "integer, static, float edges",
    "static": "integer, static",
    "a scale for each token": "integer, a scale for each token",
}


@table("integer-activations", "integer forms", " | ".join(("weights, activations", *INTEGER_FORMS)))
def integer_forms() -> Lines:
    """Yield accuracy and emulated cost of the forms of a linear."""
    rows, forms = having("integer_forms", kind="emulated linear"), tuple(INTEGER_FORMS.values())
    for weights, activations in product(("normal", "student t3"), values_of(rows, "activations")):
        asked = {"weights": weights, "activations": activations, "tokens": 128}
        found = (last(rows, form=form, **asked)["sqnr_db"] for form in forms)
        yield f"{weights}, {activations}", *(f"{sqnr_db:.1f}" for sqnr_db in found)
    for tokens in (32, 128, 256):
        least = (min(row["cpu_ms"] for row in having(rows, form=form, tokens=tokens)) for form in forms)
        yield f"CPU ms, {tokens} tokens", *(f"{value:.0f}" for value in least)


@table("integer-activations", "codes")
def codes() -> Lines:
    """Yield times of the kernels that write and read codes."""
    rows = [row for row in rows_of("integer_forms") if row["kind"].startswith("codes on")]
    lengths = sorted({row["tokens"] for row in rows})
    yield "kernel, rows of 4096", *(f"m = {tokens}" for tokens in lengths)
    for name in values_of(rows, "kernel"):
        yield name, *(f"{last(rows, kernel=name, tokens=tokens)['least_us']:.0f}" for tokens in lengths)


@table("integer-activations", "integer perplexity", sides="ll")
def integer_perplexity() -> Lines:
    """Yield the perplexity of models with float and integer graphs."""
    rows = having("integer_forms", kind="perplexity")
    kinds = values_of(rows, "weights")
    yield "model", "device", "windows", *kinds, "linears that kept floats"
    for model, device in values_of(rows, "model", "device"):
        found = [last(rows, model=model, device=device, weights=kind) for kind in kinds]
        kept = f"{len(found[-1]['failed'])} of {found[-1]['calibrated']}"
        values = (f"{row['perplexity']:.3f}" for row in found)
        yield model, f"`{device}`", str(found[-1]["windows"]), *values, kept


@table("llm-npu", "w8a8 perplexity")
def w8a8_perplexity() -> Lines:
    """Yield the perplexity of models at precision w8a8."""
    rows = having("integer_forms", kind="w8a8 perplexity")
    kinds = values_of(rows, "weights")
    yield "model", "windows", *kinds, "of them in 16 bits"
    for model in values_of(rows, "model"):
        found = [last(rows, model=model, weights=kind) for kind in kinds]
        changes = [100 * (row["perplexity"] / found[0]["perplexity"] - 1) for row in found]
        values = (
            f"{row['perplexity']:.3f} ({change:+.2f} %)" for row, change in zip(found, changes, strict=True)
        )
        yield model, str(found[0]["windows"]), *values, str(found[-1]["operators in 16 bits"])


# -- 8-bit activations ---------------------------------------------------------------------------------

BAND: Final = 5
"""Layers of a line."""

WORST: Final = 8
"""Operators whose losses are shown."""


def accuracy_lines(rows: Sequence[Row]) -> Lines:
    """Yield titles, one for each model, strength, text and calibration, and a line for each method."""
    latest = {(_column(row), _method(row)): row for row in having(rows, kind="accuracy")}
    found = list(dict.fromkeys(column for column, _ in latest))
    several = [len(set(values)) > 1 for values in zip(*found, strict=True)]
    titles = ["method"]
    for model, strength, text, calibrating in found:
        outliers = f", outliers x{strength:g}" if strength != 1 else ""
        words = f", {text}" if several[2] else ""
        windows = f", {calibrating} windows calibrate" if several[3] else ""
        titles.append(f"{model}{outliers}{words}{windows}")
    yield titles
    for name in dict.fromkeys(name for _, name in latest):
        own = (latest.get((column, name)) for column in found)
        yield name, *("" if row is None else _change(row) for row in own)


@table("llm-npu-tables", "accuracy of the bundled model")
def bundled_accuracy() -> Lines:
    """Yield the perplexity of the bundled model with 8-bit activations."""
    return accuracy_lines(having("accuracy", model=BUNDLED))


@table("llm-npu-tables", "accuracy of a published model")
def published_accuracy() -> Lines:
    """Yield the perplexity of the published model with 8-bit activations."""
    return accuracy_lines(having("accuracy", model=PUBLISHED))


@table(
    "llm-npu-tables",
    "outlier channels",
    "operators | inputs | outlier channels of 512 tokens | that ever have one | hot channels (most)",
)
def outliers() -> Lines:
    """Yield the outlier channels of each kind of operator: figures 10 and 11 of the paper."""
    for group in values_of(_operators(), "group"):
        own = having(_operators(), group=group)
        shares, ever, hot = (
            [100 * one[name] / one["channels"] for one in own]
            for name in ("outlier_channels", "channels_ever", "hot_channels")
        )
        channels = f"{mean(one['outlier_channels'] for one in own):.1f} ({mean(shares):.1f} %)"
        most = f"{mean(hot):.1f} % ({max(hot):.1f} %)"
        yield f"`{group}`", str(own[0]["channels"]), channels, f"{mean(ever):.1f} %", most


@table("llm-npu-tables", "importance")
def importance() -> Lines:
    """Yield the largest importance of each kind of operator in bands of layers: figure 12 of the paper."""
    groups = values_of(_operators(), "group")
    yield "layers", *(f"`{group}`" for group in groups)
    end = max(one["layer"] for one in _operators())
    for first in range(0, end + 1, BAND):
        band = [one for one in _operators() if first <= one["layer"] < first + BAND]
        largest = (max(one["importance"] for one in having(band, group=group)) for group in groups)
        yield f"{first} to {min(first + BAND - 1, end)}", *(f"{value:,.0f}" for value in largest)


@table(
    "llm-npu-tables",
    "losses",
    "operator | perplexity | median deviations | place by importance | place by error",
)
def losses() -> Lines:
    """Yield the operators that lose most without their shadow, and their places in other orders.

    A loss is over the median of all: 8-bit grids everywhere else make each one uncertain by the same draw.
    """
    operators = _operators()
    middle = median(one["loss"] for one in operators)
    spread = median(abs(one["loss"] - middle) for one in operators)
    by_loss, *orders = (
        sorted(operators, key=lambda one: one[name], reverse=True) for name in ("loss", "importance", "gain")
    )
    for one in by_loss[:WORST]:
        places = (str(order.index(one) + 1) for order in orders)
        change, deviations = 100 * math.expm1(one["loss"] - middle), (one["loss"] - middle) / spread
        yield f"`{one['group']}` of layer {one['layer']}", f"{change:+.1f} %", f"{deviations:.0f}", *places


def _operators() -> list[Row]:
    found: list[Row] = last("accuracy", model=PUBLISHED, kind="outliers")["operators"]
    return found


def _column(row: Row) -> tuple[str, float, str, int]:
    return row["model"], row["strength"], row.get("text", "held_out.txt"), row["calibration_windows"]


def _method(row: Row) -> str:
    if row["method"] != "shadow":
        return str(row["method"])
    limit_db = row.get("int16_limit_db")
    wide = "" if limit_db is None else f", 16 bits below {limit_db:g} dB"
    if row["pruned"] == 0:
        return f"shadow, none pruned{wide}"
    ranking = "" if row["pruned"] == 100 else f" by {row['ranking']}"
    kind = ", clamped without it" if row["scale"] == "threshold" else ""
    return f"shadow, {row['pruned']} % pruned{ranking}{kind}{wide}"


def _change(row: Row) -> str:
    if "change_percent" not in row:
        return f"{row['perplexity']:.3f}"
    change, error = row["change_percent"], row["standard_error_percent"]
    digits = 1 if abs(change) < 100 else 0
    return f"{change:+,.{digits}f} ({error:,.{digits}f}) %, {100 * row['top_1_agreement']:.0f} %"


# -- sparse attention ----------------------------------------------------------------------------------

KEEPS: Final = (0.2, 0.3, 0.4, 0.5)
SHOWN_MASSES: Final = (0.8, 0.9, 0.95, 0.99)
RULES: Final = {
    "mass": "by attention mass",
    "importance": "by importance, with floor and cap",
    "importance_literal": "by importance, literally",
    "uniform": "alike in all heads",
}


@table(
    "shadow-attention",
    "needed keys",
    " | ".join(("model", "tokens", *(f"{mass:.0%} of the attention" for mass in SHOWN_MASSES))),
)
def needed() -> Lines:
    """Yield each model's shares of keys that hold shares of attention."""
    rows = having("sparse_accuracy", kind="heads")
    for model, tokens in values_of(rows, "model", "tokens"):
        row = last(rows, model=model, tokens=tokens)
        shares = np.array([head for layer in row["heads"] for head in layer["needed"]])
        found = 100 * shares[:, [row["masses"].index(mass) for mass in SHOWN_MASSES]]
        cells = (f"{mean:.1f}, {most:.0f} %" for mean, most in zip(found.mean(0), found.max(0), strict=True))
        yield model, f"{tokens}", *cells


def _loss(name: str, model: str, tokens: int) -> None:
    """Declare a table of the loss of one model, a line for each way to select keys."""
    at_first: Row = {"rule": "mass", "keep": KEEPS[0], "whole": None}
    ways: list[tuple[str, Row]] = [
        *(
            (words, {"rule": rule, "keep": keep, "buckets": 1, "whole": None})
            for rule, words in RULES.items()
            for keep in KEEPS
        ),
        ("by attention mass, exact scores", {**at_first, "buckets": 0}),
        ("by attention mass, 5 buckets", {**at_first, "buckets": 5}),
        ("by attention mass, 9 buckets", {**at_first, "buckets": 9}),
        ("by attention mass, all of the text sparse", {**at_first, "buckets": 1, "whole": True}),
    ]

    @table("shadow-attention", name)
    def lines() -> Lines:
        own = having("sparse_accuracy", kind="loss", model=model, tokens=tokens)
        texts = values_of(own, "text")
        yield "keys", "kept", *texts
        dense = (last(own, text=text, rule="dense")["perplexity"] for text in texts)
        yield "dense", "", *(f"perplexity {perplexity:.2f}" for perplexity in dense)
        for words, asked in ways:
            found = [having(own, text=text, **asked) for text in texts]
            if any(found):
                yield words, f"{asked['keep']:.0%}", *(_rise(rows[-1]) if rows else "" for rows in found)


def _rise(row: Row) -> str:
    rise, error = row["rise_nats"], row["standard_error_nats"]
    return f"{rise:+.3f} ({error:.3f}), {row['top_1_agreement']:.0%}"


_loss("loss of the published model", PUBLISHED, 2048)
_loss("loss at 4096 tokens", PUBLISHED, 4096)
_loss("loss at 8192 tokens", PUBLISHED, 8192)
_loss("loss of the bundled model", BUNDLED, 512)


@table("shadow-attention", "agreement")
def agreement() -> Lines:
    """Yield recall and attention mass for each way to select keys."""
    rows = having("sparse_accuracy", kind="agreement")
    models = values_of(rows, "model", "tokens")
    titles = (f"{model}, {tokens} tokens: recall | attention kept" for model, tokens in models)
    yield " | ".join(("keys", "kept", *titles)).split(" | ")
    ways = [("uniform", keep, 1) for keep in KEEPS]
    ways += [("uniform", KEEPS[0], 5), ("uniform", KEEPS[0], 9), ("mass", KEEPS[0], 1)]
    for rule, keep, count in ways:
        cells: list[str] = []
        for model, tokens in models:
            found = having(rows, model=model, tokens=tokens, rule=rule, keep=keep, buckets=count)
            cells += _agreement(found[-1]) if found else ["", ""]
        yield f"{RULES[rule]}, {count} bucket{'s' if count > 1 else ''}", f"{keep:.0%}", *cells


def _agreement(row: Row) -> Iterator[str]:
    yield f"{100 * row['recall']:.1f}, {100 * row['worst_recall']:.1f} %"
    yield f"{100 * row['mass']:.1f}, {100 * row['worst_mass']:.0f} %"


@table("shadow-attention", "retrieval")
def retrieval() -> Lines:
    """Yield a line for each way to select keys, by the depth of the sentence."""
    own = [row for row in having("sparse_accuracy", kind="retrieval") if "sentence" in row]
    depths, sentences = sorted({row["depth"] for row in own}), values_of(own, "sentence")
    yield "keys", *(f"at {depth:.0%}" for depth in depths)
    for rule in values_of(own, "rule"):
        name = "dense" if rule == "dense" else f"{RULES[rule]}, {last(own, rule=rule)['keep']:.0%}"
        cells = []
        for depth in depths:
            found = [last(own, rule=rule, depth=depth, sentence=one) for one in sentences]
            nats = sum(row["nats"] for row in found) / len(found)
            cells.append(f"{sum(row['found'] for row in found)} of {len(found)} ({nats:.2f})")
        yield name, *cells


PICTURE_KEEP: Final = 0.2
CELL: Final = 20
"""Width of a head's column in the picture; rows are half as high."""


def kept_picture() -> str:
    """Return an SVG of what each head keeps by the rule of attention mass: a row for each layer."""
    row = last("sparse_accuracy", kind="heads", model=PUBLISHED, tokens=2048)
    needs = tuple(tuple(map(tuple, layer["needed"])) for layer in row["heads"])
    ratios = keep_ratios(HeadNeeds(tuple(row["masses"]), needs), PICTURE_KEEP)
    heads, layers = len(ratios[0]), len(ratios)
    width, height = 60 + heads * CELL + 120, 60 + layers * CELL // 2 + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="9" role="img">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="8" y="16" font-size="11">Keys that each query head keeps, {PUBLISHED}</text>',
        f'<text x="8" y="30">mean {PICTURE_KEEP:.0%}; calibrated on windows of {row["tokens"]} tokens</text>',
    ]
    for layer, kept in enumerate(ratios):
        y = 44 + layer * CELL // 2
        if layer % 5 == 0:
            parts.append(f'<text x="52" y="{y + 8}" text-anchor="end">layer {layer}</text>')
        for head, share in enumerate(kept):
            parts.append(
                f'<rect x="{56 + head * CELL}" y="{y}" width="{CELL - 1}" height="{CELL // 2 - 1}" '
                f'fill="{_colour(share)}"><title>layer {layer}, head {head}: {share:.0%}</title></rect>'
            )
    x = 56 + heads * CELL + 16
    for place, share in enumerate((0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)):
        y = 44 + place * 14
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="12" fill="{_colour(share)}"/>')
        parts.append(f'<text x="{x + CELL + 4}" y="{y + 9}">{share:.0%}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _colour(share: float) -> str:
    """Return a colour from pale to dark, by the logarithm of a share from 10 % on."""
    dark = float(np.clip(np.log(share / 0.1) / np.log(10), 0, 1))
    pale, deep = (222, 235, 247), (8, 48, 107)
    mixed = (round(a + (b - a) * dark) for a, b in zip(pale, deep, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


# -- mixtures of experts -------------------------------------------------------------------------------

TEXTS: Final = ("code", "prose")


@table(
    "mixture-of-experts",
    "popularity of experts",
    "text | layer | choices of each expert, % | imbalance | tiers",
    "llll",
)
def popularity() -> Lines:
    """Yield shares of the tokens, by falling popularity, for text and layer."""
    for text in TEXTS:
        for row in having("experts", kind="popularity", text=text):
            counts = np.sort(row["counts"])[::-1]
            shares = "  ".join(f"{share:.0f}" for share in 100 * counts / counts.sum())
            tiers = ", ".join(map(str, row["tiers"]))
            yield text, f"{row['layer']}", shares, f"{row['imbalance']:.2f}", tiers


@table("mixture-of-experts", "overlap of experts")
def overlap() -> Lines:
    """Yield the mean Overlap@K over the layers for each two texts."""
    rows = having("experts", kind="overlap")
    numbers = sorted({row["experts"] for row in rows})
    yield "texts", *(f"K = {number}" for number in numbers)
    for one, other, name in (
        ("code", "prose", "code and prose"),
        ("code", "code", "two halves of the code"),
        ("prose", "prose", "two halves of the prose"),
    ):
        found = (last(rows, one=one, other=other, experts=number) for number in numbers)
        yield name, *(f"{np.mean(row['by_layer']):.0%}" for row in found)


@table("mixture-of-experts", "padding and overflow")
def padding_and_overflow() -> Lines:
    """Yield padding and overflow for each capacity, without any run."""
    rows = having("experts", kind="capacity")
    asked = [(text, {"calibration": text, "text": text}) for text in TEXTS]
    asked += [
        (f"{text}, calibrated on {other}", {"calibration": other, "text": text})
        for text, other in (TEXTS, TEXTS[::-1])
    ]
    yield "capacity", *(name for name, _ in asked)
    for capacity in values_of(rows, "capacity"):
        found = (having(rows, capacity=capacity, **texts)[-1:] for _, texts in asked)
        cells = (
            "".join(f"{row['padding_share']:.0%}, {row['overflow_share']:.1%}" for row in own)
            for own in found
        )
        yield f"{capacity}", *cells


@table(
    "mixture-of-experts",
    "perplexity under overflow",
    "capacity, overflow | code: NPU | code: dropped | code: perplexity (loss, nats) | prose: NPU "
    "| prose: dropped | prose: perplexity (loss, nats)",
)
def overflow() -> Lines:
    """Yield perplexities for each capacity and fate of the overflow."""
    own = having("experts", kind="overflow")
    for capacity, fate in values_of(own, "capacity", "overflow"):
        cells: list[str] = []
        for text in TEXTS:
            row = last(own, capacity=capacity, overflow=fate, text=text)
            if capacity:
                rises = _losses(row) - _losses(last(own, capacity=0, text=text))
                error = rises.std(ddof=1) / len(rises) ** 0.5
                cells += [f"{row['npu_share']:.1%}", f"{row['dropped_share']:.1%}"]
                cells.append(f"{row['perplexity']:.2f} ({round(rises.mean(), 3) + 0.0:+.3f} ± {error:.3f})")
            else:
                cells += ["", "", f"{row['perplexity']:.2f}"]
        yield f"{capacity}, `{fate}`" if capacity else "level `gpu`", *cells


def _losses(row: Row) -> NDArray[np.float64]:
    return np.array(row["mean_losses"])


def _reads() -> list[dict[str, Any]]:
    """Return what a decoded token reads, the last row of each model."""
    rows = having("experts", kind="bytes")
    return [
        {
            "share": row["read_bytes"] / row["all_bytes"],
            "bytes": row["read_bytes"] / row["active_parameters"],
            **{
                name: value / 1e6 if isinstance(value, (int, float)) else value for name, value in row.items()
            },
        }
        for row in {row["model"]: row for row in rows}.values()
    ]


plain_table(
    "mixture-of-experts",
    "bytes of a decoded token",
    "model | parameters, M | active, M | weights, MB | read for a token, MB | of all | "
    "bytes for an active parameter | counted by",
    "{model} | {all_parameters:,.0f} | {active_parameters:,.1f} | {all_bytes:,.1f} | {read_bytes:,.1f} | "
    "{share:.1%} | {bytes:.2f} | {counted}",
    _reads,
    "lrrrrrrl",
)
