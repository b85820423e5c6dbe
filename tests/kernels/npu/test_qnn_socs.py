"""The chip of a machine, by whatever names it, and what an old Hexagon refuses."""

import platform
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from heterollm.base import DeviceError, GraphError
from heterollm.kernels.formats import random_weight
from heterollm.kernels.npu import SOCS, LinearShape, LinearShard, QnnNpu, qnn_available, qnn_runtime, qnn_socs
from heterollm.kernels.npu import qnn as npu_qnn
from heterollm.kernels.npu.qnn_socs import find_soc, this_soc
from heterollm.kernels.ops import WeightFormat

USABLE, REASON, _ = qnn_available(emulator=True)
needs_qnn = pytest.mark.skipif(not USABLE, reason=REASON)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make this machine one that names its chip in some places, and nowhere else."""

    def make(*, system="Linux", metadata=None, registry=None, android=None, tree=None, processor="", **soc0):
        for name, text in soc0.items():
            (tmp_path / name).write_text(f"{text}\n")
        if tree is not None:
            (tmp_path / "compatible").write_bytes(tree.encode() + b"\0")

        def stated():
            if metadata is None:
                raise DeviceError("no Hexagon")
            return tuple(metadata)

        class Key:
            def __enter__(self):
                return self

            def __exit__(self, *_error):
                pass

        def query(_key, name):
            assert name == "ProcessorNameString"
            return registry, 1

        def open_key(_root, path):
            assert path.endswith(r"CentralProcessor\0")
            if registry is None:
                raise FileNotFoundError
            return Key()

        program = tmp_path / "getprop"
        program.write_text(f"#!/bin/sh\n[ $1 = ro.soc.model ] && {android or 'exit 1'}\n")
        program.chmod(0o700)
        monkeypatch.setattr(qnn_socs, "ANDROID_PROPERTIES", str(program))
        if android is not None:
            monkeypatch.setattr(sys, "getandroidapilevel", lambda: 34, raising=False)
        winreg = SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=open_key, QueryValueEx=query)
        monkeypatch.setitem(sys.modules, "winreg", winreg)
        monkeypatch.setattr(qnn_socs, "provider_metadata", stated)
        monkeypatch.setattr(qnn_socs, "SOC_FOLDER", tmp_path)
        monkeypatch.setattr(qnn_socs, "DEVICE_TREE", tmp_path / "compatible")
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "processor", lambda: processor)
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")

    return make


X_ELITE = "Snapdragon(R) X Elite - X1E80100 - Qualcomm(R) Oryon(TM) CPU"
ARM = "ARMv8 (64-bit) Family 8 Model 1 Revision 201, Qualcomm Technologies Inc"


@pytest.mark.parametrize(
    ("places", "number"),
    [
        ({"metadata": ["2", "Snapdragon(R) X Elite - X1E78100 - Qualcomm(R) Hexagon(TM) NPU"]}, "60"),
        ({"metadata": ["Snapdragon(R) X Plus - X1P42100 - Qualcomm(R) Hexagon(TM) NPU"]}, "120"),
        ({"metadata": ["Snapdragon(R) X2 Elite Extreme - X2E94100 - Qualcomm(R) Hexagon(TM) NPU"]}, "88"),
        ({"metadata": ["a Hexagon"], "machine": "SM8650"}, "57"),
        ({"system": "Windows", "registry": X_ELITE, "processor": ARM}, "60"),
        ({"system": "Windows", "registry": "Snapdragon(R) X Plus - X1P64100 - CPU", "processor": ARM}, "60"),
        ({"system": "Windows", "registry": "Snapdragon (TM) 8cx Gen 3 @ 3.0 GHz", "processor": ARM}, "37"),
        ({"system": "Windows", "registry": None, "processor": ARM}, ARM),
        ({"machine": "SM8650", "soc_id": "557"}, "57"),
        ({"machine": "SM8750P"}, "69"),
        ({"machine": "sc8380xp"}, "60"),
        ({"machine": "QCS9075"}, "77"),
        ({"machine": "Snapdragon something", "soc_id": "660"}, "87"),
        ({"machine": "PINEAPPLE", "soc_id": "557"}, "57"),
        ({"machine": "X1E80100", "soc_id": "615"}, "60"),
        ({"tree": "qcom,sm8550-qrd\0qcom,sm8550"}, "43"),
        ({"tree": "lenovo,yoga-slim7x\0qcom,x1e80100", "processor": "aarch64"}, "60"),
        ({"tree": "radxa,dragon-q6a\0qcom,qcm6490"}, "93"),
        ({"machine": "MSM8998", "soc_id": "292"}, "MSM8998"),
        ({"android": "echo SM8650", "system": "Android", "machine": "PINEAPPLE"}, "57"),
        ({"android": "echo SM8750P"}, "69"),
        ({"android": "exit 1", "machine": "SM8650"}, "57"),
        ({"android": "echo"}, "aarch64"),
        ({"machine": "", "soc_id": "x", "processor": ""}, "aarch64"),
        ({}, "aarch64"),
    ],
)
def test_a_chip_is_known_by_one_number(machine, places, number):
    machine(**places)
    assert this_soc() == number


def test_a_longer_name_is_the_other_chip():
    assert find_soc("SM8850-AC").model == "87"
    assert find_soc("SM8850L").model == "92"
    assert find_soc("AXM8650") is find_soc("XSM8650") is find_soc("") is None


def test_each_name_and_number_is_of_one_chip():
    names = [name for soc in SOCS.values() for name in soc.names]
    ids = [number for soc in SOCS.values() for number in soc.soc_ids]
    assert len(set(names)) == len(names)
    assert len(set(ids)) == len(ids)
    assert len({soc.name for soc in SOCS.values()}) == len(SOCS)
    for number, soc in SOCS.items():
        assert soc.model == number
        assert all(find_soc(name) is soc for name in soc.names)


@needs_qnn
def test_the_providers_metadata_are_read(monkeypatch):
    import onnxruntime

    kinds = onnxruntime.OrtHardwareDeviceType
    hardware = SimpleNamespace(
        type=kinds.NPU, metadata={"Description": "Hexagon of a SM8650", "Discrete": "0"}
    )
    device = SimpleNamespace(
        ep_name=qnn_runtime.PROVIDER, device=hardware, ep_metadata={"library_path": "/x", "version": "1"}
    )
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [device])
    try:
        assert qnn_runtime.provider_metadata() == ("1", "Hexagon of a SM8650", "0")
        assert this_soc() == "57"
    finally:
        qnn_runtime._provider_device.cache_clear()


# -- what a Hexagon refuses ----------------------------------------------------------------------------

OLD = [number for number, soc in SOCS.items() if soc.architecture < 69]


@needs_qnn
@pytest.mark.parametrize("number", OLD)
def test_v68_refuses_4_bits_with_words(number):
    npu = QnnNpu(emulator=True, soc_model=number)
    weight = random_weight(np.random.default_rng(0), 64, 64, WeightFormat(4, 32))
    shard = LinearShard(weight, 0, "o", ((0, 64),), "a shard")
    with pytest.raises(GraphError, match=r"Hexagon v68 of .* 4-bit weights with float activations need v69"):
        npu.prepare(shard, 32)
    with pytest.raises(DeviceError, match=r"cannot be used: the Hexagon v68 of") as caught:
        npu.self_test()
    assert "--npu-threads 0" in caught.value.fix
    floats = npu.forms(LinearShape(WeightFormat(16), 64), 32)
    assert bool(floats) is SOCS[number].takes_float16


@needs_qnn
def test_newer_ones_take_4_bits():
    assert len(OLD) == 3
    for number in set(SOCS) - set(OLD):
        npu = QnnNpu(emulator=True, soc_model=number)
        assert npu.name == "Hexagon emulator (QNN HTP)"
        assert npu.forms(LinearShape(WeightFormat(4, 32), 64), 32)[0] == "matmul_nbits"


@needs_qnn
@pytest.mark.emulator
@pytest.mark.parametrize("number", [pytest.param(one, marks=pytest.mark.slow) for one in SOCS])
def test_the_table_is_the_emulators(number):
    """QNN compiles the form that the table promises, and refuses the one that it does not."""
    soc = SOCS[number]
    npu = QnnNpu(emulator=True, soc_model=number)
    for bits, taken in ((4, soc.takes_4_bits), (16, soc.takes_float16)):
        weight = WeightFormat(bits, 32 if bits == 4 else 0)
        shard = LinearShard(random_weight(np.random.default_rng(0), 64, 64, weight), 0, "o", ((0, 64),), "x")
        if taken:
            assert npu.build(shard, 32).size_bytes > 0
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(npu_qnn.SOCS, number, SOCS["57"])  # so that the graph reaches QNN
            with pytest.raises(GraphError):
                npu.build(shard, 32)


@needs_qnn
def test_a_graph_compiled_ahead_is_found_on_the_device(machine, monkeypatch):
    """Static: a Hexagon would open the file that the compiler wrote, whatever names its chip."""
    weight = random_weight(np.random.default_rng(0), 64, 64, WeightFormat(4, 32))
    shard = LinearShard(weight, 0, "o", ((0, 64),), "a shard")
    ahead = QnnNpu(emulator=True, soc_model="60")._binary(shard, "matmul_nbits", 32)
    monkeypatch.setattr(npu_qnn, "qnn_available", lambda *, emulator: (True, "", ""))
    machine(system="Windows", registry=X_ELITE, processor=ARM)
    real = QnnNpu(emulator=False, power="burst")
    assert real._binary(shard, "matmul_nbits", 32) == ahead
    assert real._target.options["soc_model"] == "60"
    machine(system="Linux", machine="MSM8998")
    unknown = QnnNpu(emulator=False)
    assert "soc_model" not in unknown._target.options
    assert unknown._binary(shard, "matmul_nbits", 32).model != ahead.model
