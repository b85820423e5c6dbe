import math
import tempfile

import pytest

from heterollm.base import GraphError, OptionError
from heterollm.kernels.npu import QnnNpu, qnn_available, qnn_cycles
from heterollm.kernels.npu.qnn_cycles import read_cycles
from heterollm.kernels.npu.qnn_runtime import QnnTarget

USABLE, REASON, _ = qnn_available(emulator=True)

HEADER = "Msg Timestamp,Message,Time,Unit of Measurement,Timing Source,Event Level,Event Identifier"
FINALIZE = "0,FINALIZE,39672,US,BACKEND,ROOT,QNN (finalize) time"


def event(cycles, unit="CYCLES"):
    return f"0,BACKEND,{cycles},{unit},BACKEND,ROOT,Accelerator (execute) time (cycles)"


def microseconds(value):
    return f"0,BACKEND,{value},US,BACKEND,ROOT,Accelerator (execute) time"


class TestTable:
    @staticmethod
    def read(tmp_path, *lines):
        path = tmp_path / "profile.csv"
        path.write_text("\n".join(lines) + "\n")
        return read_cycles(path, "o of layer 3")

    def test_every_run_is_one_count(self, tmp_path):
        runs = [line for cycles in (444445, 247356, 1) for line in (event(cycles), microseconds(9))]
        assert self.read(tmp_path, HEADER, FINALIZE, *runs) == (444445, 247356, 1)

    def test_columns_are_found_by_name(self, tmp_path):
        lines = ["Event Identifier,Later,Time,Unit of Measurement"]
        lines.append("Accelerator (execute) time (cycles),x,7,CYCLES")
        assert self.read(tmp_path, *lines) == (7,)

    @pytest.mark.parametrize(
        ("lines", "found"),
        [
            ([], "no column 'Event Identifier', but nothing"),
            (["Msg Timestamp,Time"], "no column 'Event Identifier', but 'Msg Timestamp', 'Time'"),
            (["Time,Event Identifier", "3,x"], "no column 'Unit of Measurement'"),
            ([HEADER], r"no event 'Accelerator \(execute\) time \(cycles\)', but nothing"),
            ([HEADER, FINALIZE, microseconds(4)], "but 'QNN .finalize. time', 'Accelerator .execute. time'"),
            ([HEADER, *(f"0,NODE,1,CYCLES,B,S,op {i}" for i in range(20))], "'op 7' and 12 more"),
            ([HEADER, "0,NODE"], "but 'None'"),
            ([HEADER, event(0)], "states '0' 'CYCLES'"),
            ([HEADER, event(5), event(-5)], "states '-5' 'CYCLES'"),
            ([HEADER, event("")], "states '' 'CYCLES'"),
            ([HEADER, event("1e9")], "states '1e9'"),
            ([HEADER, event("9" * 5000)], "states '999"),
            ([HEADER, event("٣")], "states '٣'"),
            ([HEADER, event(7, "US")], "states '7' 'US'"),
        ],
    )
    def test_anything_else_is_an_error_that_names_what_was_found(self, tmp_path, lines, found):
        with pytest.raises(GraphError, match=f"o of layer 3 .*{found}") as caught:
            self.read(tmp_path, *lines)
        assert "onnxruntime-qnn" in caught.value.fix

    def test_a_file_that_cannot_be_read(self, tmp_path):
        path = tmp_path / "profile.csv"
        for content in (None, b"\xff\xfe\x00", b'"' + b"a" * 200_000):
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(GraphError, match=r"o of layer 3 (cannot be read|has no column)"):
                read_cycles(path, "o of layer 3")


@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
class TestEmulator:
    @pytest.fixture
    def npu(self, cache_folder, tmp_path, monkeypatch):
        working, temporary = tmp_path / "working", tmp_path / "temporary"
        for folder in (working, temporary):
            folder.mkdir()
        monkeypatch.chdir(working)
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        backend = QnnNpu(emulator=True, compile_in_child=False)
        yield backend
        backend.close()
        assert [*working.iterdir(), *temporary.iterdir()] == []

    @staticmethod
    def least(npu, part, cases, holds):
        """The smallest counts of ``(length, form)`` cases, measured anew while other work inflates them."""
        least = dict.fromkeys(cases, math.inf)
        for _ in range(8):
            for length, form in cases:
                counts = npu.count_cycles(part, length, form, runs=20)
                assert len(counts) == 20
                least[length, form] = min(least[length, form], *counts)
            if holds(least):
                break
        return least

    def test_weight_first_moves_in_steps_of_32_tokens(self, npu, make_slice, cache_folder):
        steps = {1: 1, 32: 1, 33: 2, 64: 2, 65: 3, 128: 4}

        def holds(least):
            step = least[32, "weight_first"]
            return all(
                abs(least[length, "weight_first"] / (count * step) - 1)
                < 0.3  # other work inflates counts unevenly
                for length, count in steps.items()
            )

        part = make_slice(256, 256, bits=16)
        least = self.least(npu, part, [(length, "weight_first") for length in steps], holds)
        assert holds(least), least
        assert not cache_folder.exists()
        assert (npu.compiled_count, npu.loaded_count) == (0, 0)

    def test_activation_first_is_dear_below_33_tokens_and_cheaper_past_them(self, npu, make_slice):
        cases = [(32, "weight_first"), (32, "activation_first"), (33, "activation_first")]

        def holds(least):
            cheap, dear, next_step = (least[case] for case in cases)
            return dear > 3 * cheap and dear > 2 * next_step

        least = self.least(npu, make_slice(256, 256, bits=16), cases, holds)
        assert holds(least), least

    def test_counts_repeat(self, npu, make_slice):
        part = make_slice(256, 256, bits=16)
        first, second = math.inf, math.inf
        for _ in range(8):
            first = min(first, *npu.count_cycles(part, 32, "weight_first", runs=20))
            second = min(second, *npu.count_cycles(part, 32, "weight_first", runs=20))
            if abs(first / second - 1) < 0.05:
                break
        assert abs(first / second - 1) < 0.05

    @pytest.mark.parametrize(
        ("kind", "lengths"), [({}, (5,)), ({"symmetric": False}, (5,)), ({"bits": 16}, (5, 96))]
    )
    def test_every_form_at_lengths_that_the_runtime_never_takes(self, npu, make_slice, kind, lengths):
        part = make_slice(32, 4352, **kind)
        for length in lengths:
            for form in npu.forms(part.format, columns=4352, length=length):
                assert all(count > 0 for count in npu.count_cycles(part, length, form, runs=2))
        with pytest.raises(GraphError, match="no graphs of length 5"):
            npu.prepare(part, 5)

    def test_a_cached_graph_is_used_and_left_as_it_is(self, npu, make_slice, cache_folder, monkeypatch):
        part = make_slice(64, 256)
        npu.prepare(part, 32)
        before = {path: path.read_bytes() for path in (cache_folder / "graphs").iterdir()}
        monkeypatch.setattr(npu, "_compile", None)
        assert len(npu.count_cycles(part, 32, runs=3)) == 3
        with pytest.raises(TypeError):
            npu.count_cycles(part, 64, runs=3)
        assert {path: path.read_bytes() for path in (cache_folder / "graphs").iterdir()} == before

    def test_a_damaged_cached_graph_is_not(self, npu, make_slice, cache_folder):
        part = make_slice(64, 256)
        npu.prepare(part, 32)
        binary = next((cache_folder / "graphs").glob("*.bin"))
        binary.write_bytes(b"")
        assert len(npu.count_cycles(part, 32, runs=1)) == 1
        assert binary.read_bytes() == b""

    def test_bad_requests_are_refused(self, npu, make_slice):
        part = make_slice(64, 256, bits=16)
        with pytest.raises(OptionError, match="not 0"):
            npu.count_cycles(part, 32, runs=0)
        with pytest.raises(GraphError, match="at least one token, not 0"):
            npu.count_cycles(part, 0, runs=1)
        with pytest.raises(GraphError, match="as token_tiles at 33 tokens"):
            npu.count_cycles(part, 33, "token_tiles", runs=1)

    def test_a_profile_without_the_event_is_an_error(self, npu, make_slice, monkeypatch):
        monkeypatch.setattr(qnn_cycles, "EVENT", "Later name (cycles)")
        with pytest.raises(GraphError, match=r"Later name.*Accelerator \(load binary\) time"):
            npu.count_cycles(make_slice(64, 256), 32, runs=1)

    def test_a_profile_that_lacks_a_run_is_an_error(self, npu, make_slice, monkeypatch):
        monkeypatch.setattr(qnn_cycles, "read_cycles", lambda table, label: (3, 4))
        with pytest.raises(GraphError, match="2 runs instead of 4"):
            npu.count_cycles(make_slice(64, 256), 32, runs=3)

    def test_a_full_temporary_folder_is_an_error_with_advice(self, npu, make_slice, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", "/nonexistent-folder")
        with pytest.raises(GraphError, match="Cannot write the graph of gate_up") as caught:
            npu.count_cycles(make_slice(64, 256), 32, runs=1)
        assert "TMPDIR" in caught.value.fix

    def test_a_real_hexagon_counts_none(self, npu, make_slice):
        npu._target = QnnTarget(emulator=False)
        assert npu.count_cycles(make_slice(64, 256), 32, runs=1) is None
