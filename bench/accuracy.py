"""What do 8-bit activations cost a model, and what do shadows of outliers repair (llm.npu, section 3.3)?

Perplexity and top-1 agreement against float weights, on windows of the bundled held-out text; other windows
calibrate. Linears are computed in torch on integer grids (exact products of codes, summed in float32), the
rest of the model in float32. Thresholds, outlier channels and errors come from heterollm's own calibration.

    python bench/accuracy.py --out bench/results/accuracy.jsonl
    python bench/accuracy.py FOLDER --windows 4 --out bench/results/accuracy.jsonl
    python bench/accuracy.py --runtime --out bench/results/accuracy.jsonl

The first runs the bundled model after outlier channels were put into it by a rescale that preserves its
function: some weights of each norm times a strength, and the columns of the next linears that read them
divided by it. The second runs a checkpoint as it is. The third runs one of the first's models through
heterollm itself, on `host`, with all shadows and with none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import heterollm
from heterollm.calibration import Policy, calibrate
from heterollm.calibration.int8_check import Int8Statistics, int8_checked
from heterollm.calibration.int8_records import Int8Calibration
from heterollm.data import bundled_model
from heterollm.kernels.formats import quantize
from heterollm.kernels.ops import Member
from heterollm.llm import LLM

WINDOW = 512
CALIBRATION_WINDOWS = 4
CHECKED_TOKENS = 64
STRENGTHS = (1, 8, 32, 128)
RUNTIME_STRENGTH = 32
OUTLIER_CHANNELS = 3
SMOOTH_POWER = 0.5
LLM_INT8_THRESHOLD = 6.0
SHARES = (0, 25, 50, 75, 85, 100)
WORST_PERCENT = 8
GROUPS = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",)}
GROUPS |= {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}

Key = tuple[int, str]
Method = Callable[["Linears", Tensor], Tensor]


def rounded(values: Tensor, largest: Tensor | float, bits: int = 8) -> Tensor:
    """Return values on a symmetric grid that reaches to the largest magnitude."""
    top = (1 << (bits - 1)) - 1
    step = torch.as_tensor(largest).clamp_min(1e-30) / top
    return torch.clamp(torch.round(values / step), -top - 1, top) * step


@dataclass
class Linears:
    """Linears of a layer that read the same input."""

    modules: list[nn.Linear]
    calibrated: Int8Calibration | None = None
    statistics: Int8Statistics | None = None
    channels: Tensor = field(default_factory=lambda: torch.zeros(1))
    outputs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = [module.weight.detach() for module in self.modules]
        self.weight = torch.cat(parts)
        # Codes and scales of precision w8a8.
        int8 = [quantize(part.numpy(), bits=8, block=32, scale_kind="tensor").dequantize() for part in parts]
        self.by_tensor = torch.from_numpy(np.concatenate(int8))
        self.by_row = rounded(self.weight, self.weight.abs().amax(1, keepdim=True))
        self.rows = [len(part) for part in parts]
        self.outputs = [0.0] * len(parts)
        members = [Member(str(place), rows) for place, rows in enumerate(self.rows)]
        self.statistics = Int8Statistics(members, self.weight.shape[1])

    @property
    def inputs(self) -> float:
        """The largest input."""
        return float(self.channels.max())

    def of_rows(self, outputs: Sequence[float]) -> Tensor:
        """Return magnitudes of members for each output row."""
        return torch.tensor(outputs).repeat_interleave(torch.tensor(self.rows))

    def measure(self, x: Tensor) -> Tensor:
        """Add an input to the statistics, and return the output."""
        y = x @ self.weight.T
        self.channels = torch.maximum(self.channels, x.abs().amax(0))
        parts = torch.split(y.abs(), self.rows, dim=1)
        self.outputs = [max(old, float(part.max())) for old, part in zip(self.outputs, parts, strict=True)]
        assert self.statistics is not None
        self.statistics.add(x.numpy(), y.numpy(), self.weight.numpy())
        self.calibrated = self.statistics.record()
        return y

    def check(self, x: Tensor) -> Tensor:
        """Measure the errors of all thresholds, choose one, and return the output."""
        assert self.calibrated is not None
        part, weight = x[:CHECKED_TOKENS].numpy(), self.by_tensor.numpy()
        self.calibrated = int8_checked(
            *(self.calibrated, weight, part),
            inputs=self.inputs,
            outputs=self.outputs,
            member_rows=self.rows,
        )
        factors = self.channels.clamp_min(1e-5) ** SMOOTH_POWER
        factors /= self.weight.abs().amax(0).clamp_min(1e-5) ** (1 - SMOOTH_POWER)
        self.smooth = factors / factors.mean()
        self.smooth_weight = self.weight * self.smooth
        self.smooth_weight = rounded(self.smooth_weight, self.smooth_weight.abs().max())
        return x @ self.weight.T


# -- methods: a group and its input give its output -----------------------------------------------------


def exact(one: Linears, x: Tensor) -> Tensor:
    """Compute with floats."""
    return x @ one.weight.T


def static(one: Linears, x: Tensor) -> Tensor:
    """Compute with static 8-bit grids, one scale for each weight."""
    return rounded(rounded(x, one.inputs) @ one.by_tensor.T, one.of_rows(one.outputs))


def static_by_row(one: Linears, x: Tensor) -> Tensor:
    """Compute with static 8-bit grids, a scale for each output row of a weight."""
    return rounded(rounded(x, one.inputs) @ one.by_row.T, one.of_rows(one.outputs))


def int16(one: Linears, x: Tensor) -> Tensor:
    """Compute with static 16-bit grids."""
    return rounded(rounded(x, 1.5 * one.inputs, 16) @ one.by_tensor.T, 1.5 * one.of_rows(one.outputs), 16)


def by_token(one: Linears, x: Tensor) -> Tensor:
    """Compute with 8-bit inputs with a scale for each token, float outputs."""
    return rounded(x, x.abs().amax(1, keepdim=True)) @ one.by_tensor.T


def smooth(one: Linears, x: Tensor) -> Tensor:
    """Compute with static 8-bit grids after factors moved from inputs into weights."""
    if len(one.modules) == 1:  # no norm before it could take the factors
        return static(one, x)
    largest = float((one.channels / one.smooth).max())
    return rounded(rounded(x / one.smooth, largest) @ one.smooth_weight.T, one.of_rows(one.outputs))


def llm_int8(one: Linears, x: Tensor) -> Tensor:
    """Compute with 8-bit inputs by token and weights by row, columns of large inputs in floats."""
    large = x.abs().amax(0) > LLM_INT8_THRESHOLD
    rest = x * ~large
    largest = rest.abs().amax(1, keepdim=True)
    return rounded(rest, largest) @ one.by_row.T + x[:, large] @ one.weight[:, large].T


def clamped(one: Linears, x: Tensor) -> Tensor:
    """The shadow's NPU part alone: outliers are cut off."""
    assert one.calibrated is not None
    shadow = one.calibrated.shadow
    return rounded(rounded(x, shadow.threshold) @ one.by_tensor.T, one.of_rows(shadow.outputs))


def shadow(one: Linears, x: Tensor) -> Tensor:
    """Compute with clamped 8-bit inputs, and the rest in floats with float weights."""
    assert one.calibrated is not None
    limit = one.calibrated.shadow.threshold
    channels = x.abs().amax(0) > limit
    rest = x[:, channels] - x[:, channels].clamp(-limit, limit)
    return clamped(one, x) + rest @ one.weight[:, channels].T


# -- models ---------------------------------------------------------------------------------------------


class Model:
    """A model whose groups of linears are computed by methods.

    Args:
        folder: The checkpoint.
        strength: Factor of the outlier channels that are put in; 1 for none.
    """

    def __init__(self, folder: Path, strength: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.groups: dict[Key, Linears] = {}
        self.method: Mapping[Key, Method] | Method = exact
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
    def logits(self, ids: Sequence[int], method: Mapping[Key, Method] | Method) -> Tensor:
        """Return the logits of a window."""
        self.method = method
        return self._model(torch.tensor([list(ids)])).logits[0]

    def save(self, folder: Path) -> None:
        """Write the checkpoint."""
        self._model.save_pretrained(folder)

    def calibrate(self, windows: Sequence[Sequence[int]]) -> None:
        """Measure on all windows but the last, which checks."""
        for ids in windows[:-1]:
            self.logits(ids, Linears.measure)
        self.logits(windows[-1], Linears.check)

    def ranked(self, measure: Callable[[Linears], float]) -> list[Key]:
        """Return the groups by a measure, the least first."""
        return sorted(self.groups, key=lambda key: measure(self.groups[key]))


def importance(one: Linears) -> float:
    """Return the largest input over the step, as the paper ranks."""
    assert one.calibrated is not None
    return one.inputs / one.calibrated.shadow.threshold * 127


def error(one: Linears) -> float:
    """Return the mean token's error of 8 bits."""
    assert one.calibrated is not None
    assert one.calibrated.errors is not None
    return one.calibrated.errors.token_nmse


def gain(one: Linears) -> float:
    """Return the error that the shadow takes away."""
    assert one.calibrated is not None
    return one.calibrated.gain


def cases(model: Model) -> Iterator[tuple[str, dict[str, Any], Mapping[Key, Method] | Method]]:
    """Yield names, options and methods."""
    yield "W8A8 per tensor, static", {}, static
    yield "A16W8 per tensor, static", {}, int16
    rankings = {"importance": model.ranked(importance), "error": model.ranked(gain)}
    for ranking, keys in rankings.items():
        for share in SHARES:
            if ranking != "importance" and share in (0, 100):
                continue
            pruned = set(keys[: round(len(keys) * share / 100)])
            plan = {key: static if key in pruned else shadow for key in keys}
            yield "shadow", {"pruned": share, "ranking": ranking, "scale": "maximum"}, plan
            if ranking == "importance" and share >= SHARES[-2]:
                plan = {key: clamped if key in pruned else shadow for key in keys}
                yield "shadow", {"pruned": share, "ranking": ranking, "scale": "threshold"}, plan
    yield "LLM.int8()", {}, llm_int8
    yield "SmoothQuant", {}, smooth
    yield "W8A8 per channel, static", {}, static_by_row
    yield "W8A8 per tensor, a scale for each token", {}, by_token
    ranked = model.ranked(error)
    worst = ranked[len(ranked) - max(1, round(len(ranked) * WORST_PERCENT / 100)) :]
    mixed = {key: int16 if key in worst else static for key in model.groups}
    yield f"W8A8 per tensor, the worst {len(worst)} operators at 16 bits", {}, mixed


def surprises(logits: Tensor, ids: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of a window."""
    return float(nn.functional.cross_entropy(logits[:-1], torch.tensor(list(ids)[1:])))


def rows(folder: Path, strength: float, count: int) -> Iterator[dict[str, Any]]:
    """Yield the outliers of a model, then its rows."""
    model = Model(folder, strength)
    text = (bundled_model() / "held_out.txt").read_text("utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if len(windows) < count + CALIBRATION_WINDOWS:
        raise SystemExit(f"The text has {len(windows)} windows.")
    model.calibrate(windows[-CALIBRATION_WINDOWS:])
    windows = windows[:count]
    common = {"model": folder.name, "strength": strength, "windows": count}
    common |= {"calibration_windows": CALIBRATION_WINDOWS, "window_tokens": WINDOW}
    yield {"kind": "outliers", **common, "operators": list(outliers(model))}
    plain, choices = [], []
    for window in windows:
        logits = model.logits(window, exact)
        plain.append(surprises(logits, window))
        choices.append(logits.argmax(1))
    yield {"kind": "accuracy", **common, "method": "float", "perplexity": float(np.exp(np.mean(plain)))}
    for name, options, method in cases(model):
        begin, found, agreed = time.perf_counter(), [], []
        for window, chosen in zip(windows, choices, strict=True):
            logits = model.logits(window, method)
            found.append(surprises(logits, window))
            agreed.append(float((logits.argmax(1) == chosen).double().mean()))
        rise = np.array(found) - plain
        ratio = float(np.exp(rise.mean()))
        yield {
            "kind": "accuracy",
            **common,
            "method": name,
            **options,
            "perplexity": float(np.exp(np.mean(found))),
            "change_percent": 100 * (ratio - 1),
            "standard_error_percent": 100 * ratio * float(rise.std(ddof=1)) / len(rise) ** 0.5,
            "top_1_agreement": float(np.mean(agreed)),
            "seconds": time.perf_counter() - begin,
        }


def runtime_rows(folder: Path, strength: float, count: int) -> Iterator[dict[str, Any]]:
    """Yield the perplexity of a model in heterollm on ``host``, with its own calibration."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = (bundled_model() / "held_out.txt").read_text("utf-8")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with tempfile.TemporaryDirectory() as made:
        Model(folder, strength).save(Path(made))
        tokenizer.save_pretrained(made)
        last = Path(made) / "last.txt"
        last.write_text(tokenizer.decode(ids[-CALIBRATION_WINDOWS * WINDOW :]), "utf-8")
        plain: list[float] = []
        for name, pruned in (("float", None), ("shadow", 0), ("shadow", 100)):
            options: dict[str, Any] = {"plan": "gpu", "precision": "fp16"}
            if pruned is not None:
                file, policy = Path(made) / f"{pruned}.json", Policy(pruned=pruned / 100)
                calibrate(made, [last], output=file, precision="w8a8", gpu_threads=1, policy=policy)
                options = {"plan": "npu", "precision": "w8a8", "calibration": file}
            found = []
            with LLM.load(made, device="host", context=WINDOW, **options) as llm:
                session = llm.session()
                for at in range(0, count * WINDOW, WINDOW):
                    session.reset()
                    window = ids[at : at + WINDOW]
                    logits = torch.from_numpy(session.prefill(window, all_logits=True).copy())
                    found.append(surprises(logits, window))
            plain = plain or found
            yield {
                "kind": "runtime",
                "model": folder.name,
                "strength": strength,
                "windows": count,
                "method": name,
                "pruned": pruned,
                "perplexity": float(np.exp(np.mean(found))),
                "change_percent": 100 * float(np.exp(np.mean(found) - np.mean(plain)) - 1),
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
            "importance": importance(one),
            "error": error(one),
            "gain": gain(one),
        }


def main() -> None:
    """Print the rows and append them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=bundled_model(), help="default: bundled")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--runtime", action="store_true", help="through heterollm itself")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    asked = parser.parse_args()
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)  # noqa: S603
    stated = {"bench": "accuracy", "version": heterollm.__version__, "commit": found.stdout.strip()}
    measured, strengths = (runtime_rows, (RUNTIME_STRENGTH,)) if asked.runtime else (rows, STRENGTHS)
    for strength in strengths if asked.model == bundled_model() else (1,):
        for row in measured(asked.model, strength, asked.windows):
            shown = {name: value for name, value in row.items() if name not in ("operators", "seconds")}
            words = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in shown.values())
            print(" | ".join(words), flush=True)
            if asked.out is not None:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**stated, **row}) + "\n")


if __name__ == "__main__":
    main()
