"""The work of `heterollm profile`: open the device, read the shapes of models, measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np

from heterollm.base import OptionError, ProfileError, Progress, format_duration
from heterollm.data import bundled_model
from heterollm.engine import check_precision
from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.ops import Power, Precision, Scales
from heterollm.model import ModelShape, default_shapes, find_model, model_shape, read_config
from heterollm.planning.load_options import check_weights
from heterollm.profiler import RunSummary, SessionOptions, essential_work, measured_code, profile_device
from heterollm.profiler.records import Profile, profile_path


@dataclass(frozen=True, slots=True)
class ProfilingResult:
    """The result of a finished run.

    Args:
        profile: The profile of the device, earlier runs included.
        summary: The work of the run.
        path: The profile's file.
        models: Names of the models whose shapes were measured.
    """

    profile: Profile
    summary: RunSummary
    path: Path
    models: tuple[str, ...]

    @property
    def useless(self) -> bool:
        """Whether every measurement failed."""
        return 0 < self.summary.measured == self.summary.failed

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return {
            "device": self.profile.device,
            "time": self.profile.time_kind,
            "fingerprint": self.profile.fingerprint,
            "path": str(self.path),
            "records": len(self.profile.records),
            "models": list(self.models),
            "run": asdict(self.summary),
        }


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """The records in the file after a run that was stopped.

    Args:
        path: The file.
        measured: Records of the run that are in it.
        records: Records in all.
    """

    path: Path
    measured: int
    records: int


class ProfilingSession:
    """An opened device with the model shapes to measure.

    Args:
        device: Name of the device.
        models: Folders of checkpoints, of which only ``config.json`` is read, or names of known models; by
            default a documented set.
        precisions: Of weights and activations.
        group_size: Weights that share a scale.
        scales: Scales of 4-bit weights; with ``stepped`` ones the NPU's integer forms are measured too.
        gpu_threads: Threads of a GPU on CPU cores.
        npu_threads: Threads of the NPU on ``host``; 0 leaves it out.
        power: Clocks and cores to ask for on ``snapdragon``.
        purpose: Purpose of a profile with a file of its own; empty for the one that all commands read.

    Raises:
        OptionError: An option is not legal.
        CheckpointError: A folder is no checkpoint.
        UnsupportedModelError: A model is of no supported kind.
        DeviceError: The device is missing, fails, or cannot compute at a precision.
    """

    def __init__(
        self,
        device: str = "auto",
        *,
        models: Sequence[str | Path] = (),
        precisions: Sequence[Precision] = ("w4a16",),
        group_size: int = 32,
        scales: Scales = "free",
        gpu_threads: int | None = None,
        npu_threads: int | None = None,
        power: Power = "burst",
        purpose: str = "",
    ) -> None:
        if not precisions:
            raise OptionError("No precision is named.", fix=f"Choose {' or '.join(get_args(Precision))}.")
        for precision in precisions:
            check_weights(precision, group_size, True, scales)
        found_models = [find_model(model, closest=False) for model in models]
        configs = [(model.config, model.name) for model in found_models]
        self.device: Device = open_device(
            device, gpu_threads=gpu_threads, npu_threads=npu_threads, power=power
        )
        self.named = bool(configs)
        float_bits: Literal[16, 32] = 32 if self.device.activation_dtype == np.float32 else 16
        try:
            if not configs and self.device.time_kind == "emulated":
                # The default set would keep an emulator busy for hours.
                configs = [(read_config(bundled_model()), "the bundled model")]
            shapes: list[ModelShape] = []
            for precision in dict.fromkeys(precisions):
                found = default_shapes(precision, group_size=group_size, float_bits=float_bits, scales=scales)
                if configs:
                    found = tuple(
                        model_shape(
                            config,
                            name,
                            precision=precision,
                            group_size=group_size,
                            float_bits=float_bits,
                            scales=scales,
                        )
                        for config, name in configs
                    )
                for shape in found:
                    check_precision(self.device, precision, shape.specs)
                    shapes.append(dataclasses.replace(shape, name=f"{shape.name} {precision}"))
            self.path = profile_path(self.device.name, self.device.fingerprint(), purpose)
        except BaseException:
            self.device.close()
            raise
        self.shapes = tuple(shapes)
        self._earlier: frozenset[str] = frozenset()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.device.close()

    def run(self, options: SessionOptions, progress: Progress | None = None) -> ProfilingResult:
        """Measure the device and write its profile.

        Args:
            options: Budget and extent; a quick run measures one model of the default set.
            progress: Called with a stage, milliseconds done and milliseconds in all, both estimated.

        Raises:
            CacheError: The profile cannot be written.
        """
        shapes = self._shapes(options)
        self._earlier = self._runs()
        profile, summary = profile_device(self.device, shapes, options, path=self.path, progress=progress)
        return ProfilingResult(profile, summary, self.path, tuple(shape.name for shape in shapes))

    @property
    def finished(self) -> bool:
        """Whether the file has a whole run of this version's kernels and graphs."""
        try:
            runs = Profile.load(self.path).runs.values()
        except ProfileError:
            return False
        return any(run["finished"] and run.get("code") == measured_code() for run in runs)

    def notes(self, options: SessionOptions) -> tuple[str, ...]:
        """Return notes for the user before a run: the device and the reason for it, and the models."""
        names = ", ".join(shape.name for shape in self._shapes(options))
        chosen = f": {self.device.reason}" if self.device.reason else ""
        notes = [f"Device {self.device.name}{chosen}", f"Shapes of {names}"]
        if options.budget_s is not None:
            need = essential_work(self.device, self._shapes(options), options)
            if need.seconds > options.budget_s:
                build_s = format_duration(need.build_seconds)
                builds = f"; {build_s} of it build {need.graphs} NPU graphs" if need.graphs else ""
                notes.append(
                    f"What plans need takes about {format_duration(need.seconds)} on this device{builds}. "
                    f"All of it is measured, although the budget is {format_duration(options.budget_s)}."
                )
        return tuple(notes)

    def _shapes(self, options: SessionOptions) -> tuple[ModelShape, ...]:
        return self.shapes if self.named or not options.quick else self.shapes[:1]

    def _runs(self) -> frozenset[str]:
        """Return the names of the runs in the file."""
        try:
            return frozenset(Profile.load(self.path).runs)
        except ProfileError:  # there is none, or a damaged one
            return frozenset()

    def kept(self) -> KeptRecords:
        """Return the records in the file after a run that was stopped."""
        try:
            profile = Profile.load(self.path)
        except ProfileError:
            return KeptRecords(self.path, 0, 0)
        own = profile.runs.keys() - self._earlier
        measured = sum(profile.runs[name].get("measured", 0) for name in own)
        return KeptRecords(self.path, measured, len(profile.records))
