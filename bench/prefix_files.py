"""Is the beginning of a prompt ready sooner from disk than from its tokens?

Reads a prompt with the plan, writes the state behind it to a file as the server does (`--prefixes-gib`), and
takes it from there into another session: both in turns. The file is in the system's page cache, as it is soon
after a restart.

    python bench/published_model.py /tmp/smollm2
    python bench/prefix_files.py /tmp/smollm2
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from conditions import script_parser
from rounds import Rounds

from heterollm.engine import open_prefix
from heterollm.llm import LLM

NAMES: Final = ("read", "load")


def main() -> None:
    """Print the times of a row, and their ratio."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("model", help="Folder of a checkpoint.")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plan", default="gpu")
    parser.add_argument("--patience", type=float, default=0.0, help="Seconds to wait for a quiet machine.")
    options = parser.parse_args()
    with (
        LLM.load(options.model, device="host", plan=options.plan, context=options.tokens + 8) as llm,
        tempfile.TemporaryDirectory() as folder,
    ):
        ids = np.random.default_rng(0).integers(3, llm.config.vocab_size, options.tokens)
        path, first, second = Path(folder) / "state.safetensors", llm.session(), llm.session()
        first.prefill(ids)
        begin_s = time.perf_counter()
        llm.on_engine_thread(lambda: first.copy_prefix(options.tokens)).write(path, {})
        write_ms = 1e3 * (time.perf_counter() - begin_s)

        def timed(name: str, _counted: bool) -> float:
            begin_s = time.perf_counter()
            if name == "read":
                first.reset()
                first.prefill(ids)
            else:
                llm.on_engine_thread(lambda: second.load_prefix(open_prefix(path)))
            return time.perf_counter() - begin_s

        rounds = Rounds(NAMES, options.patience)
        rounds.run(options.rounds, timed)
        read_ms, load_ms = (1e3 * statistics.median(rounds.seconds[name]) for name in NAMES)
        size_mib = path.stat().st_size / 2**20
    print(f"{options.tokens} tokens of {Path(options.model).name} at {options.plan}, measured on host")
    print(
        f"read {read_ms:.0f} ms; from a file of {size_mib:.0f} MiB {load_ms:.0f} ms; "
        f"written in {write_ms:.0f} ms"
    )
    print(f"load / read {load_ms / read_ms:.3f}")


if __name__ == "__main__":
    main()
