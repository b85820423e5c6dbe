"""The diagnosis of `heterollm doctor`: operators against their oracles, hardware and software in use."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from heterollm.base import DeviceError, OptionError, Progress, cache_root, format_bytes, see, silent
from heterollm.kernels.device import Device
from heterollm.kernels.devices import list_devices, open_device
from heterollm.kernels.formats import ComputeType
from heterollm.kernels.ops import Power
from heterollm.kernels.threads import allowed_cores

if TYPE_CHECKING:
    from heterollm.doctor.case import Check

PACKAGES: Final = ("heterollm", "numpy", "pyopencl", "onnx", "onnxruntime", "onnxruntime-qnn", "tokenizers")
NOT_INSTALLED: Final = "not installed"
VENDORS: Final = Path("/etc/OpenCL/vendors")
MAPPED: Final = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and how to solve it."""

    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result of an examination.

    Args:
        device: Name of the device.
        facts: Hardware and software in use, as pairs of name and value.
        checks: Every operator on each processor.
        problems: Reasons why the device cannot be used.
        warnings: Problems that do not prevent its use.
    """

    device: str
    facts: tuple[tuple[str, str], ...]
    checks: tuple[Check, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]

    @property
    def passed(self) -> bool:
        """Whether the device opened and no check failed."""
        return not self.problems and all(check.status != "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return {
            "device": self.device,
            "passed": self.passed,
            "facts": dict(self.facts),
            "problems": [asdict(problem) for problem in self.problems],
            "warnings": [asdict(warning) for warning in self.warnings],
            "checks": [asdict(check) for check in self.checks],
        }


def diagnose(
    name: str = "auto",
    *,
    gpu_threads: int | None = None,
    npu_threads: int | None = None,
    power: Power = "burst",
    progress: Progress | None = None,
) -> Diagnosis:
    """Open a device and run every operator on each of its processors against the float64 oracle.

    A device that does not open is reported as a problem and raises no error.

    Args:
        name: Name of the device, or ``auto``.
        gpu_threads: Threads of the GPU on ``host`` and ``emulator``.
        npu_threads: Threads of the NPU on ``host``.
        power: Clocks and cores to ask for on ``snapdragon``.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        OptionError: The name or a thread count is not legal, or the device is simulated.
    """
    report = progress or silent
    software = _software_facts()
    try:
        device = open_device(name, gpu_threads=gpu_threads, npu_threads=npu_threads, power=power)
    except DeviceError as error:
        problem, others = _explain(name, error)
        return Diagnosis(name, software, (), (problem,), (*others, *_vendor_warnings()))
    if device.is_simulated:
        raise OptionError(
            f"{device.name} is simulated: it computes nothing, so there are no numbers to check.",
            fix="Check the kernels on this machine: `heterollm doctor --device host`.",
        )
    # Imported here: opening the device reports an OpenCL binding that cannot be used.
    from heterollm.doctor.case import run_case
    from heterollm.doctor.checks import device_cases

    try:
        facts = (*software, *_device_facts(device))
        compute: ComputeType = "fp16" if device.activation_dtype.itemsize == 2 else "fp32"
        cases = device_cases(device)
        checks = []
        for done, case in enumerate(cases):
            report("Checking operators", done, len(cases))
            checks.append(run_case(case, compute))
        report("Checking operators", len(cases), len(cases))
    finally:
        device.close()
    variants = tuple(
        Problem(note, f"Update the OpenCL driver. {see('a-part-computes-wrong-numbers')}")
        for note in device.gpu.variants.notes
    )
    return Diagnosis(device.name, facts, tuple(checks), (), (*variants, *_vendor_warnings()))


def unlisted_vendors(vendors: Path = VENDORS, mapped: Path = MAPPED) -> tuple[str, ...]:
    """Return the OpenCL libraries that the system's loader knows and this process did not load.

    pyopencl's wheels bring their own loader, which may miss a vendor's library
    (https://github.com/inducer/pyopencl/issues/906). Empty where the system has no such folder.
    """
    try:
        loaded = {Path(line.split()[-1]).name for line in mapped.read_text().splitlines() if "/" in line}
        entries = sorted(vendors.glob("*.icd"))
        named = [line.strip() for entry in entries for line in entry.read_text().splitlines()]
    except OSError:
        return ()
    # A library is loaded under the name of its link's target: only the stem is the same.
    stems = {name.partition(".so")[0] for name in loaded}
    return tuple(name for name in named if name and Path(name).name.partition(".so")[0] not in stems)


def _vendor_warnings() -> tuple[Problem, ...]:
    return tuple(
        Problem(
            f"{library} is listed in {VENDORS}, but the OpenCL loader in use does not offer it.",
            f"Set OCL_ICD_VENDORS={VENDORS}; if that does not help, HETEROLLM_OPENCL_LIBRARY={library}. "
            + see("no-adreno-among-the-opencl-devices"),
        )
        for library in unlisted_vendors()
    )


def _explain(name: str, error: DeviceError) -> tuple[Problem, tuple[Problem, ...]]:
    """Return why a device did not open, and for ``auto`` why the others did not.

    Opening stops at the first missing component; `heterollm devices` checks all.
    """
    unusable = {status.name: status for status in list_devices() if not status.usable}
    if name in unusable:
        return Problem(unusable[name].reason, unusable[name].fix), ()
    others = [Problem(f"{status.name}: {status.reason}", status.fix) for status in unusable.values()]
    return Problem(error.message, error.fix), tuple(others) if name == "auto" else ()


# -- facts -------------------------------------------------------------------------------------------


def _software_facts() -> tuple[tuple[str, str], ...]:
    versions = {package: _version(package) for package in PACKAGES}
    if versions["onnxruntime-qnn"] == NOT_INSTALLED:
        versions["onnxruntime-qnn"] += "; emulator and snapdragon need it: `heterollm devices` says how"
    return (
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("python", f"{platform.python_version()} ({sys.implementation.name})"),
        *versions.items(),
        ("cores of this process", str(len(allowed_cores()))),
        ("cache folder", str(cache_root())),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def _device_facts(device: Device) -> tuple[tuple[str, str], ...]:
    from heterollm.kernels.gpu import binding_name

    traits, npu = device.gpu.traits, device.npu
    sync = f"coherent ({device.gpu.shared_memory}): no map, each processor sees what the other has written"
    if not traits.coherent:
        beside = "while the GPU computes" if device.gpu.maps_beside_kernels else "while the GPU idles"
        sync = f"not coherent (mapped): memory is mapped {beside}, and unmapped, at every split"
    facts = [
        ("device", f"{device.name} ({device.reason})" if device.reason else device.name),
        ("time", device.time_kind),
        ("thread split", str(device.split) if device.split.gpu_cores else "each processor has its own"),
        ("activations", f"{device.activation_dtype.name}, KV cache {device.cache_dtype.name}"),
        ("GPU", traits.name),
        ("OpenCL binding", binding_name()),
        ("OpenCL platform", f"{traits.platform}, {traits.version}"),
        ("OpenCL driver", traits.driver),
        ("compiled for", device.gpu.target or "the processor that the driver detects"),
        ("compute units", f"{traits.compute_units}, work-groups up to {traits.max_work_group}"),
        ("largest buffer", format_bytes(traits.max_buffer_bytes)),
        ("GPU memory", f"{format_bytes(traits.global_bytes)}, local {format_bytes(traits.local_bytes)}"),
        ("half arithmetic", _yes(traits.has_half)),
        ("subgroups", _yes(traits.has_subgroups)),
        ("integer dot product", _yes(traits.has_integer_dot)),
        ("synchronisation", sync),
        ("OpenCL extensions", " ".join(traits.extensions)),
    ]
    if npu is None:
        return (*facts, ("NPU", "none"))
    versions = ", ".join(f"{name} {version}" for name, version in npu.versions().items())
    return (
        *facts,
        ("NPU", npu.name),
        ("NPU software", versions),
        ("standard lengths", ", ".join(map(str, npu.standard_lengths))),
        ("row alignment", str(npu.row_alignment)),
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
