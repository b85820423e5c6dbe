"""The files of modelled SoCs: what they hold, and what a damaged or mistaken one is told."""

from __future__ import annotations

import contextlib
from importlib import resources
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import HeteroLLMError, OptionError
from heterollm.kernels.sim import soc_names
from heterollm.kernels.sim.soc.parameters import TEMPLATE, load_soc, parse_soc
from heterollm.kernels.sim.soc.quantities import quantities, unit_of

FOLDER = resources.files("heterollm.kernels.sim.soc")
TEXT = (FOLDER / "snapdragon-8gen3-paper.yaml").read_text("utf-8")


def test_names() -> None:
    assert soc_names() == (
        "apple-m2",
        *("snapdragon-8elite", "snapdragon-8elite-gen5", "snapdragon-8gen3", "snapdragon-8gen3-paper"),
        *("snapdragon-x-elite", "snapdragon-x2-elite", "snapdragon-x2-elite-extreme"),
    )


@pytest.mark.parametrize(
    "name", ["Snapdragon-8Gen3-Paper", "sim:snapdragon-8gen3-paper", "SIM:SNAPDRAGON-8GEN3-PAPER"]
)
def test_a_name_may_be_in_any_case_and_that_of_its_device(name: str) -> None:
    assert load_soc(name) == load_soc("snapdragon-8gen3-paper")


def test_a_path_is_taken_as_written(tmp_path: Path) -> None:
    (tmp_path / "Mine.yaml").write_text(TEXT, "utf-8")
    for path in (tmp_path / "Mine.yaml", f"sim:{tmp_path / 'Mine.yaml'}"):
        assert load_soc(path).digest() == load_soc("snapdragon-8gen3-paper").digest()
    if not (tmp_path / "mine.yaml").exists():  # as on file systems that know no case
        with pytest.raises(OptionError, match=r"no SoC or file .*mine\.yaml"):
            load_soc(tmp_path / "mine.yaml")


@pytest.mark.parametrize("name", soc_names())
def test_every_parameter_states_value_unit_meaning_and_source(name: str) -> None:
    tree = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    for dotted, quantity in quantities().items():
        leaf = tree
        for part in dotted.split("."):
            leaf = leaf.get(part, {})
        if not leaf and "based_on" in tree:
            continue
        assert leaf["unit"] == unit_of(quantity)
        assert leaf["meaning"] == quantity.description
        assert {"value", "source"} <= leaf.keys()


def test_this_programs_path_is_the_fitted_chip_with_what_it_states() -> None:
    """Its file is short: whoever doubts a difference from the paper reads each with its source."""
    own, paper = load_soc("snapdragon-8gen3"), load_soc("snapdragon-8gen3-paper")
    stated = yaml.safe_load((FOLDER / "snapdragon-8gen3.yaml").read_text("utf-8"))
    named = {
        f"{section}.{name}"
        for section in stated
        if isinstance(stated[section], dict)
        for name in stated[section]
    }
    changed = {name for name, value in own.values().items() if value != paper.values()[name]}
    assert changed <= named
    assert all(
        note["note"] for section in stated.values() if isinstance(section, dict) for note in section.values()
    )
    # The chip is the same: what the paper's fit says of float graphs and of memory stays.
    assert not {"npu.array_tflops", "memory.limit_gbps", "npu.dequantize_gweights_per_s"} & named


def test_loading_is_deterministic() -> None:
    for name in soc_names():
        assert load_soc(name) == load_soc(name)
    assert len({load_soc(name).digest() for name in soc_names()}) == len(soc_names())


def test_the_template_is_a_soc(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text((FOLDER / f"{TEMPLATE}.yaml").read_text("utf-8"))
    soc = load_soc(path)
    assert soc.name == "my-soc"
    known = load_soc("snapdragon-8gen3")
    changed = {name for name, value in soc.values().items() if value != known.values()[name]}
    assert changed == {"npu.dequantize_gweights_per_s"}


def test_the_template_lists_all_parameters() -> None:
    text = (FOLDER / f"{TEMPLATE}.yaml").read_text("utf-8")
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    for name, quantity in quantities().items():
        limits = f"{unit_of(quantity)}, {quantity.ge:g} to {quantity.le:g}"
        assert f"{name} ({limits}): {quantity.description}" in comment


def test_overrides_change_what_they_name_and_are_remembered() -> None:
    soc = load_soc("snapdragon-8gen3-paper", {"npu.tile": 16, "power.balanced.gpu_watts": 2.5})
    assert (soc.npu.tile, soc.power.balanced.gpu_watts) == (16, 2.5)
    assert soc.changed == ("npu.tile", "power.balanced.gpu_watts")
    assert dict(soc.sources)["npu.tile"] == "user"
    assert soc.digest() != load_soc("snapdragon-8gen3-paper").digest()


def test_a_digest_tells_the_parameters_of_attention_scores() -> None:
    changes: list[dict[str, float]] = [{}, {"npu.scores_start_us": 1000.0}, {"npu.scores_tops": 0.1}]
    assert len({load_soc("snapdragon-8gen3-paper", change).digest() for change in changes}) == len(changes)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("npu.dequantise_gweights_per_s", 1.0, "no parameter"),
        ("dequantize_gweights_per_s", 1.0, "Did you mean npu.dequantize_gweights_per_s"),
        ("npu", 1.0, "no parameter"),
        ("", 1.0, "no parameter"),
        ("npu.tile", 2.5, "npu.tile: Expected `int`, got `float`"),
        ("npu.tile", 0, "npu.tile: Expected `int` >= 1"),
        ("gpu.dram_gbps", -1.0, "gpu.dram_gbps: Expected `float` >= 0.1"),
        ("gpu.dram_gbps", float("nan"), "Expected `float` >= 0.1"),
        ("gpu.dram_gbps", float("inf"), "Expected `float` <= 10000"),
        ("gpu.dram_gbps", True, "Expected `float`, got `bool`"),
        ("gpu.dram_gbps", "40", "Expected `float`, got `str`"),
        ("gpu.dram_gbps", 70.0, "more than memory.limit_gbps"),
        ("memory.corun_slowdown", 0.9, "memory.corun_slowdown: Expected `float` >= 1"),
    ],
)
def test_bad_overrides_are_refused(name: str, value: float, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        load_soc("snapdragon-8gen3-paper", {name: value})


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("soc: snapdragon-8gen3-paper", "", "missing required field .soc"),
        ("version: 1", "version: 2", "version: Invalid enum value 2; choose 1"),
        ("version: 1", "version: true", "version: Expected .int., got .str"),
        (
            'unit: "GB/s"',
            'unit: "MB/s"',
            r"own.yaml: gpu\.dram_gbps\.unit: Invalid enum value 'MB/s'; choose GB/s",
        ),
        (
            "source: fitted",
            "source: guessed",
            r"own.yaml: gpu\.dram_gbps\.source: Invalid enum value 'guessed'; "
            "choose extrapolated, fitted, prior, published, user",
        ),
        (
            "  gemm_tflops:",
            "  gemm_tflop:",
            "own.yaml: gpu: .* unknown field .gemm_tflop.; choose dram_gbps, gemm_tflops",
        ),
        ("gpu:", "cpu2:", "unknown field .cpu2.; choose soc, version, description, based_on, gpu"),
        ("  gemm_tflops:", "  dram_gbps:", "twice"),
        ("    source: fitted", "    sauce: fitted", "unknown field .sauce"),
        ("    source: fitted\n", "", r"gpu\.dram_gbps: .*missing required field .source"),
        ("value: 43.3", "value: fast", r"gpu\.dram_gbps\.value: Expected .float., got .str"),
        ("value: 43.3", "value: 0", r"gpu\.dram_gbps\.value: Expected .float. >= 0\.1"),
        ("description: >-", "description: []\nnothing: >-", "description: Expected .str., got .array"),
        (
            "version: 1",
            "version: 1\nbased_on: snapdragon-9",
            "choose apple-m2, snapdragon-8elite, snapdragon-8elite-gen5, snapdragon-8gen3, ",
        ),
        ("version: 1", "version: 1\nbased_on: [a]", "based_on: Expected"),
        ("gpu:", "gpu: 5\nx:", "gpu: Expected .object., got .int"),
        ("gpu:", "gpu: [", "no sound YAML"),
        ("gpu:", "gpu: &a\n  x: *b", "no sound YAML"),
        ("gpu:", "gpu: !!python/object/apply:os.getcwd []\nx:", "gpu: Expected .object., got .array"),
    ],
)
def test_bad_files_are_refused_with_the_reason(old: str, new: str, told: str) -> None:
    text = TEXT.replace("value: " + str(load_soc("snapdragon-8gen3-paper").gpu.dram_gbps), "value: 43.3")
    assert old in text
    with pytest.raises(OptionError, match=told):
        parse_soc(text.replace(old, new, 1), "own.yaml")


@pytest.mark.parametrize(
    "text", ["", "5", "- a", "null", "{}", "1: 2", "\x00", "[" * 50_000, "- " * 40_000, "a: " * 50]
)
def test_what_is_no_file_of_a_soc_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_soc(text, "own.yaml")


def test_many_keys_are_read_quickly() -> None:
    text = "".join(f"k{number}: 1\n" for number in range(9000))
    with pytest.raises(OptionError, match="unknown field `k0`"):
        parse_soc(text, "own.yaml")


@pytest.mark.parametrize("text", ["4e2", "+400", "400.", "4.0E+2"])
def test_numbers_may_be_written_as_one_likes(text: str) -> None:
    soc = parse_soc(TEXT.replace("value: 400.0", f"value: {text}", 1), "own.yaml")
    assert soc == load_soc("snapdragon-8gen3-paper")


@pytest.mark.parametrize("text", ["nan", "inf", ".inf", "1_000", "0x10", "1:30", "yes", "", "9" * 30, "[4]"])
def test_what_is_no_plain_number_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"hand_over\.finish_us\.value: Expected `float`"):
        parse_soc(TEXT.replace("value: 400.0", f"value: {text}", 1), "own.yaml")


def test_a_bare_value_is_not_enough() -> None:
    text = "soc: a\nversion: 1\nbased_on: snapdragon-8gen3-paper\ndescription: b\ngpu:\n  gemm_tflops: 5\n"
    with pytest.raises(OptionError, match=r"own.yaml: gpu.gemm_tflops: Expected `object`, got `int`"):
        parse_soc(text, "own.yaml")


def test_missing_parameters_are_named() -> None:
    text = "soc: a\nversion: 1\ndescription: b\n"
    with pytest.raises(OptionError, match=r"lacks gpu\.dram_gbps"):
        parse_soc(text, "own.yaml")


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_text("a" * 100_001)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "none.yaml", large, binary, "a\0b", "x" * 5000, TEMPLATE, ""):
        with pytest.raises(OptionError):
            load_soc(path)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    for document in (text, TEXT[: len(text) * 7] + text):
        with contextlib.suppress(HeteroLLMError):
            parse_soc(document, "own.yaml")
