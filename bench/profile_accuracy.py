"""How far predicted times are from measured ones, on weight shapes that were kept out of the fit.

For each predictor and processor: median and 90th percentile of the relative error, and regret, the mean share
of time lost by choosing splits (and, between NPU graphs of one shard, forms) by predicted times; beside a
constant rate. The aims are printed with what was reached, and where errors are largest.

On a device, from its profile; on the emulator, from recorded costs (bench/emulator_cycles.py):

    python bench/profile_accuracy.py --device host [--profile FILE]
    python bench/profile_accuracy.py --device emulator
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final, get_args

from baseline_models import ConstantRate
from conditions import script_parser
from emulator_cycles import RESULTS, all_points, read_counts, settled

from heterollm.profiler.predict import CANDIDATES, Score, held_out_predictions
from heterollm.profiler.predict.time_model import ShapeModel
from heterollm.profiler.predict.validation import PointTimes
from heterollm.profiler.records import LinearKey, LinearPoint, Processor, Profile
from heterollm.profiler.records.profile import stored_profiles

MEDIAN_AIM: Final = {"emulator": 0.05, "host": 0.12}
HIGH_AIM: Final = {"emulator": 0.15}
REGRET_AIM: Final = 0.03
ALL_FOLDS: Final = 1000
SHOWN_PLACES: Final = 5


def emulator_times(path: Path) -> dict[Processor, PointTimes]:
    """Return the emulator's smallest recorded costs of the points that settled."""
    counts = read_counts(path)
    found = {point: float(min(entry)) for point, entry in counts.items() if settled(entry)}
    print(f"{len(found)} of {len(all_points())} points have settled; the others are left out.\n")
    return {"gpu": {}, "npu": found}


def profile_times(path: Path) -> dict[Processor, PointTimes]:
    """Return the measured linear layers of a profile, of the code that was measured last."""
    profile = Profile.load(path)
    print(f"{path}: {profile.device}, {profile.time_kind} time, {len(profile.records)} records\n")
    times: dict[Processor, PointTimes] = {}
    for processor in get_args(Processor):
        found = [(key, record) for key, record in profile.of_kind(LinearKey) if key.processor == processor]
        code = max(found, key=lambda item: item[1].taken_s)[0].code if found else ""
        times[processor] = {key.point: record.median_us for key, record in found if key.code == code}
    return times


def report(device: str, times: Mapping[Processor, PointTimes]) -> None:
    """Print the scores of every model and processor, and how they stand to the aims."""
    for processor in get_args(Processor):
        if not times[processor]:
            continue
        other = times["npu" if processor == "gpu" else "gpu"]
        found = []
        for model in (*CANDIDATES[processor], ConstantRate):
            own = times[processor]
            bounded = model is not ConstantRate
            if predicted := held_out_predictions(model, own, most_folds=ALL_FOLDS, bounded=bounded):
                found.append(Score.of(model.name, processor, own, other, predicted))
        if not found:
            print(f"{processor}: one weight shape only, so that none can be kept out of the fit.\n")
            continue
        shapes = len({(point.columns, point.rows) for point in times[processor]})
        print(f"{processor}: {len(times[processor])} slices of {shapes} weight shapes\n")
        print("| model | median error | 90th percentile | regret | choices |\n|---|---:|---:|---:|---:|")
        for entry in found:
            regret = "none" if entry.regret is None else f"{entry.regret:.1%}"
            errors = f"{entry.median_error:.1%} | {entry.high_error:.1%}"
            print(f"| {entry.model} | {errors} | {regret} | {entry.choices} |")
        names = {model.name: model for model in CANDIDATES[processor]}
        used = min((entry for entry in found if entry.model in names), key=lambda entry: entry.rank)
        _aims(device, used)
        _worst(names[used.model], times[processor])


def _aims(device: str, used: Score) -> None:
    """Print what the model in use reached of each aim."""
    reached = [
        ("median error", used.median_error, MEDIAN_AIM.get(device)),
        ("90th percentile", used.high_error, HIGH_AIM.get(device)),
        ("regret", used.regret, REGRET_AIM),
    ]
    print(f"\nIn use: {used.model}.")
    for name, value, aim in reached:
        if value is not None and aim is not None:
            verdict = "met" if value <= aim else f"missed by {value - aim:.1%}"
            print(f"- {name}: {value:.1%}, aim {aim:.0%}: {verdict}")


def _worst(model: type[ShapeModel], times: PointTimes) -> None:
    """Print which shapes and tokens the tenth of largest errors belongs to."""
    found = held_out_predictions(model, times, most_folds=ALL_FOLDS)
    predicted = {point: prediction.us for point, prediction in found.items()}
    ordered = sorted(times, key=lambda point: -abs(predicted[point] / times[point] - 1.0))
    tenth = ordered[: max(len(ordered) // 10, 1)]

    def most(name: str, values: list[object]) -> None:
        text = ", ".join(f"{value} ({count})" for value, count in Counter(values).most_common(SHOWN_PLACES))
        print(f"- of the {len(tenth)} largest errors, by {name}: {text}")

    most("columns x rows", [f"{point.columns} x {point.rows}" for point in tenth])
    most("tokens", [point.tokens for point in tenth])
    most("form", [point.form or "kernel" for point in tenth])
    for point in ordered[:SHOWN_PLACES]:
        print(f"- {_name(point)}: {predicted[point]:.0f} predicted, {times[point]:.0f} measured")
    print()


def _name(point: LinearPoint) -> str:
    form = f", {point.form}" if point.form else ""
    return f"{point.group} {point.columns} x {point.rows}, {point.tokens} tokens{form}"


def main() -> None:
    """Print the report of a device."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--device", choices=("host", "emulator", "snapdragon"), default="host")
    parser.add_argument("--profile", type=Path, help="a profile file; the device's newest by default")
    parser.add_argument("--out", type=Path, default=RESULTS, help="recorded costs on the emulator")
    options = parser.parse_args()
    if options.device == "emulator" and options.profile is None:
        report("emulator", emulator_times(options.out))
        return
    stored = [path for path in stored_profiles() if path.name.startswith(options.device)]
    path = options.profile or max(stored, key=lambda found: found.stat().st_mtime, default=None)
    if path is None:
        parser.error(f"There is no profile of {options.device}: run `heterollm profile`.")
    report(options.device, profile_times(path))


if __name__ == "__main__":
    main()
