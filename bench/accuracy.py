"""What do 8-bit activations cost a model, and what do shadows of outliers repair (llm.npu, section 3.3)?

Perplexity and top-1 agreement against float weights, on windows of text; other windows calibrate. Linears are
computed in torch on integer grids (bench/accuracy_methods.py: exact products of codes, sums in float32), the
rest of the model in float32. Thresholds, outlier channels and errors come from heterollm's own calibration.

    python bench/accuracy.py --out bench/results/accuracy.jsonl
    python bench/accuracy.py FOLDER --windows 8 --text prose --text code --out bench/results/accuracy.jsonl
    python bench/accuracy.py --runtime --out bench/results/accuracy.jsonl

The first runs the bundled model after outlier channels were put into it by a rescale that preserves its
function: some weights of each norm times a strength, and the columns of the next linears that read them
divided by it. The second runs a checkpoint as it is, calibrated on code and prose alike. The last runs one of
the first's models through heterollm itself, on `host`, with all shadows and with none. Rows are appended as
they are found; the methods that are compared come first, for each text, and variants of them last. A run that
was cut short goes on: rows that `--out` has already are left out, and measured losses are taken from it.

Code is the bundled held-out text; prose are the paragraphs of Python's own language reference, as
`pydoc_data.topics` has them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import accuracy_methods as methods
import numpy as np
import torch
from accuracy_methods import Linears, Method
from conditions import append_rows, origin, script_parser
from perplexity import llm_surprises
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from heterollm.calibration import Policy, calibrate
from heterollm.data import bundled_model
from heterollm.llm import LLM
from heterollm.text.likelihood import perplexity, surprises, top_1_agreement

WINDOW = 512
CALIBRATION_WINDOWS = 8
RANKED_TOKENS = 256
"""Tokens of calibration windows on which each group alone loses its shadow."""

STRENGTHS = (1, 8, 32, 128)
RUNTIME_STRENGTH = 32
OUTLIER_CHANNELS = 3
SHARES = (50, 75, 85)
SMALL_SHARE = 25
PAPER_SHARE = 85
RANKINGS = ("importance", "loss")
INT16_LIMIT_DB = 25.0
INT16_LIMITS_DB = (20.0, INT16_LIMIT_DB)
WORST_PERCENT = 8
GROUPS = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",)}
GROUPS |= {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}

Row = Mapping[str, Any]
Key = tuple[int, str]
Choice = Mapping[Key, Method] | Method
Case = tuple[str, dict[str, Any], Choice]
"""A name, what else a row says of the method, and the method."""


def code() -> tuple[str, str]:
    """Return the name and the text of Python code."""
    return "held_out.txt", (bundled_model() / "held_out.txt").read_text("utf-8")


def prose() -> tuple[str, str]:
    """Return the name and the text of English prose: whole paragraphs, each once."""
    parts = chain.from_iterable(topics[name].split("\n\n") for name in sorted(topics))
    lines = dict.fromkeys(" ".join(part.split()) for part in parts)
    found = [line for line in lines if line[:1].isupper() and line.endswith(".") and len(line) > WINDOW // 4]
    return f"pydoc topics of Python {platform.python_version()}", "\n\n".join(found)


TEXTS = {"code": code, "prose": prose}


class Model:
    """A model whose groups of linears are computed by methods.

    Args:
        folder: The checkpoint.
        strength: Factor of the outlier channels that are put in; 1 for none.
    """

    def __init__(self, folder: Path, strength: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.groups: dict[Key, Linears] = {}
        self.losses: dict[Key, float] = {}
        self.method: Choice = methods.exact
        generator = np.random.default_rng(0)
        for number, layer in enumerate(self._model.model.layers):
            blocks = (layer.self_attn, layer.self_attn, layer.mlp, layer.mlp)
            norms = (layer.input_layernorm, None, layer.post_attention_layernorm, None)
            for (group, names), block, norm in zip(GROUPS.items(), blocks, norms, strict=True):
                modules = [getattr(block, name) for name in names]
                if norm is not None and strength != 1:
                    channels = generator.choice(len(norm.weight), OUTLIER_CHANNELS, replace=False)
                    norm.weight.data[channels] *= strength
                    for module in modules:
                        module.weight.data[:, channels] /= strength
                self.groups[number, group] = Linears(modules)
                self._replace((number, group), modules)

    def _replace(self, key: Key, modules: Sequence[nn.Linear]) -> None:
        made: list[Tensor] = []

        def first(x: Tensor) -> Tensor:
            method = self.method if callable(self.method) else self.method[key]
            y = method(self.groups[key], x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
            made[:] = torch.split(y, [module.out_features for module in modules], dim=-1)
            return made[0]

        modules[0].forward = first  # type: ignore[method-assign]
        for place, module in enumerate(modules[1:], 1):
            module.forward = lambda _x, place=place: made[place]  # type: ignore[method-assign]

    @torch.no_grad()
    def logits(
        self, ids: Sequence[int], method: Choice, state: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """Return the logits of a window, from the state before a layer if there is one."""
        self.method = method
        if state is None:
            return self._model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        layers = self._model.model.layers
        self._model.model.layers = layers[first:]
        try:
            return self._model(inputs_embeds=state, use_cache=False).logits[0]
        finally:
            self._model.model.layers = layers

    @torch.no_grad()
    def states(self, ids: Sequence[int], method: Choice) -> tuple[Tensor, ...]:
        """Return the state before each layer of a window."""
        self.method = method
        made = self._model.model(torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)
        return tuple(made.hidden_states)

    def save(self, folder: Path) -> None:
        """Write the checkpoint."""
        self._model.save_pretrained(folder)

    def calibrate(self, windows: Sequence[Sequence[int]]) -> None:
        """Measure on all windows of token ids but the last, which checks."""
        for ids in windows[:-1]:
            self.logits(ids, Linears.measure)
        self.logits(windows[-1], Linears.check)

    def rank(self, windows: Sequence[Sequence[int]]) -> None:
        """Measure what each group alone loses without its shadow."""
        self.losses = dict.fromkeys(self.groups, 0.0)
        for ids in windows:
            part = ids[:RANKED_TOKENS]
            states = self.states(part, methods.shadow)
            whole = surprises(self.logits(part, methods.shadow).numpy(), part).mean()
            for key in self.groups:
                without = dict.fromkeys(self.groups, methods.shadow) | {key: methods.static}
                logits = self.logits(part, without, states[key[0]], key[0])
                self.losses[key] += float(surprises(logits.numpy(), part).mean() - whole) / len(windows)

    def ranked(self, measure: Callable[[Linears], float]) -> list[Key]:
        """Return the groups by a measure, the least first."""
        return sorted(self.groups, key=lambda key: measure(self.groups[key]))

    def below(self, limit_db: float, plan: Mapping[Key, Method]) -> list[Key]:
        """Return the groups to which a plan's 8 bits leave a smaller signal-to-noise ratio."""
        return [key for key, one in self.groups.items() if _sqnr_db(one, plan[key]) < limit_db]


def _sqnr_db(one: Linears, method: Method) -> float:
    assert one.calibrated is not None
    errors = one.calibrated.errors_of("shadow" if method is methods.shadow else "int8")
    assert errors is not None
    return errors.sqnr_db


def cases(model: Model) -> Iterator[Case]:
    """Yield the methods that are compared."""
    yield "W8A8 per tensor, static", {}, methods.static
    yield "W8A8 per channel, static", {}, methods.static_by_row
    yield "SmoothQuant", {}, methods.smooth
    yield "LLM.int8()", {}, methods.llm_int8
    plans = Plans(model)
    yield plans.pruned(0)
    for share in SHARES:
        for ranking in RANKINGS:
            yield plans.pruned(share, ranking)
    yield plans.pruned(100)
    yield plans.wide(PAPER_SHARE, INT16_LIMIT_DB)
    yield "A16W8 per tensor, static", {}, methods.int16


def further_cases(model: Model) -> Iterator[Case]:
    """Yield variants of the methods."""
    plans = Plans(model)
    for share in SHARES:
        yield plans.pruned(share, "error")
    for share in (PAPER_SHARE, 100):
        yield plans.pruned(share, scale="threshold")
    for limit_db in INT16_LIMITS_DB:
        yield plans.wide(0, limit_db)
    for ranking in (*RANKINGS, "error"):
        yield plans.pruned(SMALL_SHARE, ranking)
    yield "W8A8 per tensor, a scale for each token", {}, methods.by_token
    ranked = model.ranked(methods.error)
    worst = ranked[len(ranked) - max(1, round(len(ranked) * WORST_PERCENT / 100)) :]
    mixed = {key: methods.int16 if key in worst else methods.static for key in model.groups}
    yield f"W8A8 per tensor, the worst {len(worst)} operators at 16 bits", {}, mixed
    # Parts of the others, which say where their loss comes from.
    for name, method in (("W8A8 per tensor, static", methods.static), ("SmoothQuant", methods.smooth)):
        apart = {key: methods.int16 if key[1] == "down" else method for key in model.groups}
        yield f"{name}, `down` at 16 bits", {}, apart
    yield "SmoothQuant, weights per channel", {}, methods.smooth_by_row
    yield "shadow, none pruned, outputs in floats", {}, methods.shadow_with_float_outputs


class Plans:
    """Shadows of a model, pruned in several orders, and with 16 bits."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._orders = {"importance": model.ranked(methods.importance), "error": model.ranked(methods.gain)}
        self._orders["loss"] = sorted(model.groups, key=lambda key: model.losses[key])

    def pruned(self, share: int, ranking: str = "importance", scale: str = "maximum") -> Case:
        """Return the case without a share of the shadows."""
        instead = methods.static if scale == "maximum" else methods.clamped
        options = {"pruned": share, "ranking": ranking, "scale": scale}
        return "shadow", options, self._plan(share, ranking, instead)

    def wide(self, share: int, limit_db: float) -> Case:
        """Return the case without a share of the shadows as the product decides, 16 bits below a limit."""
        name, options, _ = self.pruned(share, "error")
        plan = self._plan(share, "error", methods.static)
        wide = self._model.below(limit_db, plan)
        stated = {"int16_limit_db": limit_db, "int16_operators": len(wide), "operators": len(plan)}
        return name, options | stated, plan | dict.fromkeys(wide, methods.int16)

    def _plan(self, share: int, ranking: str, instead: Method) -> dict[Key, Method]:
        keys = self._orders[ranking]
        pruned = set(keys[: round(len(keys) * share / 100)])
        return {key: instead if key in pruned else methods.shadow for key in keys}


def windows_of(folder: Path, text: str, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the first windows of a text, and the last ones, which calibrate."""
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    found = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if len(found) < count + CALIBRATION_WINDOWS:
        raise SystemExit(f"The text has {len(found)} windows.")
    return found[:count], found[-CALIBRATION_WINDOWS:]


def rows(
    folder: Path, strength: float, count: int, tested: Sequence[str], old: Sequence[Row]
) -> Iterator[dict[str, Any]]:
    """Yield the outliers of a model, then its rows, without those that are there already."""
    model = Model(folder, strength)
    # The bundled model knows no prose.
    known = ("code",) if folder == bundled_model() else tuple(TEXTS)
    found = {name: windows_of(folder, TEXTS[name]()[1], count) for name in known}
    last = zip(*(calibrating for _, calibrating in found.values()), strict=True)
    calibrating = list(chain.from_iterable(last))[-CALIBRATION_WINDOWS:]
    model.calibrate(calibrating)
    calibrated = {"model": folder.name, "strength": strength, "calibration_windows": CALIBRATION_WINDOWS}
    calibrated |= {"calibration_texts": list(known), "window_tokens": WINDOW}
    common = {**calibrated, "windows": count}
    ranked = _having(old, kind="outliers", **calibrated)
    if ranked:
        model.losses = {(one["layer"], one["group"]): one["loss"] for one in ranked[-1]["operators"]}
    else:
        model.rank(calibrating[-len(known) :])
        yield {"kind": "outliers", **common, "operators": list(outliers(model))}
    stated, floats = {}, {}
    for name in tested:
        windows = found[name][0]
        key = hashlib.sha256(np.array(windows, np.int32).tobytes()).hexdigest()[:16]
        stated[name] = {**common, "text": TEXTS[name]()[0], "text_key": key}
        floats[name] = [model.logits(ids, methods.exact).numpy() for ids in windows]
        plain = map(surprises, floats[name], windows)
        if not _having(old, **stated[name], method="float"):
            yield {"kind": "accuracy", **stated[name], "method": "float", "perplexity": perplexity(plain)}
    for chosen, name in product((cases, further_cases), tested):
        done = partial(_having, old, **stated[name])
        left = (
            (method, options, choice)
            for method, options, choice in chosen(model)
            if not done(method=method, **{"int16_limit_db": None, **options})
        )
        for row in method_rows(model, found[name][0], floats[name], left):
            yield {"kind": "accuracy", **stated[name], **row}


def _having(rows: Iterable[Row], **asked: object) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in asked.items())]


def method_rows(
    model: Model, windows: Sequence[Sequence[int]], floats: Sequence[Any], chosen: Iterable[Case]
) -> Iterator[dict[str, Any]]:
    """Yield what methods do to a text, beside its logits in floats."""
    plain = [surprises(logits, ids) for logits, ids in zip(floats, windows, strict=True)]
    for name, options, method in chosen:
        begin, found, agreed = time.perf_counter(), [], []
        for ids, reference in zip(windows, floats, strict=True):
            logits = model.logits(ids, method).numpy()
            found.append(surprises(logits, ids))
            agreed.append(top_1_agreement(logits, reference))
        rise = np.array([one.mean() for one in found]) - [one.mean() for one in plain]
        ratio = float(np.exp(rise.mean()))
        yield {
            "method": name,
            **options,
            "perplexity": perplexity(found),
            "change_percent": 100 * (ratio - 1),
            "standard_error_percent": 100 * ratio * float(rise.std(ddof=1)) / len(rise) ** 0.5,
            "top_1_agreement": float(np.mean(agreed)),
            "seconds": time.perf_counter() - begin,
        }


def runtime_rows(
    folder: Path, strength: float, count: int, _tested: Sequence[str], _old: Sequence[Row]
) -> Iterator[dict[str, Any]]:
    """Yield the perplexity of a model in heterollm on ``host``, with its own calibration."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows, last = windows_of(folder, code()[1], count)
    with tempfile.TemporaryDirectory() as made:
        Model(folder, strength).save(Path(made))
        tokenizer.save_pretrained(made)
        text = Path(made) / "last.txt"
        text.write_text(tokenizer.decode(list(chain.from_iterable(last))), "utf-8")
        plain: list[float] = []
        for name, pruned in (("float", None), ("shadow", 0), ("shadow", 100)):
            options: dict[str, Any] = {"plan": "gpu", "precision": "fp16"}
            if pruned is not None:
                file, policy = Path(made) / f"{pruned}.json", Policy(pruned=pruned / 100)
                calibrate(made, [text], output=file, precision="w8a8", gpu_threads=1, policy=policy)
                options = {"plan": "npu", "precision": "w8a8", "calibration": file}
            with LLM.load(made, device="host", context=WINDOW, **options) as llm:
                found = perplexity(llm_surprises(llm, windows))
            plain = plain or [found]
            yield {
                "kind": "runtime",
                "model": folder.name,
                "strength": strength,
                "windows": count,
                "method": name,
                "pruned": pruned,
                "perplexity": found,
                "change_percent": 100 * (found / plain[0] - 1),
            }


def outliers(model: Model) -> Iterator[dict[str, Any]]:
    """Yield the outliers of each operator, as in the paper's figures 10 to 12."""
    for (layer, group), one in model.groups.items():
        assert one.calibrated is not None
        chosen = one.calibrated.shadow
        yield {
            "layer": layer,
            "group": group,
            "channels": one.weight.shape[1],
            "outlier_channels": chosen.window_channels / (CALIBRATION_WINDOWS - 1),
            "channels_ever": len(chosen.outliers),
            "hot_channels": len(chosen.hot_channels),
            "importance": methods.importance(one),
            "error": methods.error(one),
            "gain": methods.gain(one),
            "loss": model.losses[layer, group],
        }


def main() -> None:
    """Print the rows and append them."""
    parser = script_parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=bundled_model(), help="default: bundled")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--text", choices=TEXTS, action="append", help="repeatable; default: code")
    parser.add_argument("--strength", type=int, action="append", help="of the bundled model's; repeatable")
    parser.add_argument("--runtime", action="store_true", help="through heterollm itself")
    asked = parser.parse_args()
    stated = origin("accuracy")
    measured, strengths = (runtime_rows, (RUNTIME_STRENGTH,)) if asked.runtime else (rows, STRENGTHS)
    strengths = tuple(asked.strength or strengths)
    lines = asked.out.read_text("utf-8").splitlines() if asked.out is not None and asked.out.exists() else ()
    old = [json.loads(line) for line in lines]
    for strength in strengths if asked.model == bundled_model() else (1,):
        for row in measured(asked.model, strength, asked.windows, asked.text or ["code"], old):
            shown = {name: value for name, value in row.items() if name not in ("operators", "seconds")}
            words = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in shown.values())
            print(" | ".join(words), flush=True)
            append_rows(asked.out, {**stated, **row})


if __name__ == "__main__":
    main()
