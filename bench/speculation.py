"""Measures speculative decoding: answers with and without guesses, and the time of passes of several tokens.

    python bench/published_model.py /tmp/smollm2
    python bench/speculation.py answers /tmp/smollm2 --draft-layers 8 --llama-cpp --profile-first --out ROWS
    python bench/random_model.py /tmp/tinyllama
    python bench/speculation.py passes /tmp/tinyllama --profile-first --out ROWS

A configuration is a plan and, behind an @, threads of GPU and NPU (tensor@1+1); auto chooses both itself. The
threads of OpenCL are fixed in a process, so that each configuration has its own process, one after the other.
If one fails, the others run, and the exit code is 1. Rows are appended as soon as they are there. Only ratios
within a process are of turns.

`answers` continues code, prose, and code that is to be repeated: each prompt by plain decoding, by lookup and
by a draft, in turns. The draft is another model of the same tokenizer (--draft), or the first layers of the
model itself (--draft-layers), which nobody trained to guess: its acceptance is that of no real draft. With
--llama-cpp, llama-cpp-python's plain decoding, prompt lookup, and loop around a draft, both with the two
guesses that it recommends for CPUs, take turns with the first configuration, with the same 4-bit weights.

`passes` times decode passes of 1 to 16 tokens behind a context, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from accuracy import TEXTS
from conditions import append_rows, conditions, script_parser
from rounds import Rounds
from sparse_prefill import first_layers

from heterollm.benchmarks import Configuration, expand, parse_threads, profile_splits
from heterollm.benchmarks.conditions import versions
from heterollm.benchmarks.plugins import load_plugin
from heterollm.llm import LLM
from heterollm.text import MOST_GUESSES, Tokenizer

LLAMA_GUESSES: Final = 2
"""llama-cpp-python recommends 2 for CPUs; its default is 10."""

LLAMA: Final = "llama.cpp"
PROMPT_TOKENS: Final = 192
MEASURED: Final = 3
"""Passes in each turn, of which the fastest counts."""


def prompts_of(tokenizer: Tokenizer, kind: str, count: int) -> list[list[int]]:
    """Return prompts of one kind: windows of a text, or of code with a request to repeat it."""
    text = TEXTS["prose" if kind == "prose" else "code"]()[1]
    ids = tokenizer.encode(text)
    if kind != "again":
        return [ids[at * 701 : at * 701 + PROMPT_TOKENS] for at in range(count)]
    short = PROMPT_TOKENS // 2
    windows = [tokenizer.decode(ids[at * 701 : at * 701 + short]) for at in range(count)]
    return [tokenizer.encode(f"{window}\n\n# The same again:\n{window[:20]}") for window in windows]


def place_of(configuration: str) -> dict[str, Any]:
    """Return a configuration's keywords of a load."""
    plan, _, threads = configuration.partition("@")
    keywords: dict[str, Any] = {"device": "host", "plan": plan}
    if threads:
        ((keywords["gpu_threads"], keywords["npu_threads"]),) = parse_threads(threads)
    return keywords


def ran_as(llm: LLM) -> dict[str, Any]:
    """Return what a loaded model runs with, for every row."""
    split = llm.device.split
    threads = f"{len(split.gpu_cores)}+{len(split.npu_cores)}"
    return {"level": llm.plan.level, "threads": threads, "notes": llm.plan_notes, "versions": versions()}


class Ways:
    """The ways to decode of one model in one configuration; each has a name and a function of a prompt.

    The functions return the tokens, the seconds after the first token, and the statistics of guesses.
    """

    def __init__(self, model: Path, configuration: str, draft: Path | None, tokens: int) -> None:
        self._tokens = tokens
        lookup = LLM.load(model, speculative="lookup", **place_of(configuration))
        self._models = [lookup]
        self.run: dict[str, Callable[[list[int]], tuple[tuple[int, ...], float, dict[str, Any]]]] = {
            "plain": lambda ids: self._answer(lookup, ids, speculate=False),
            "lookup": lambda ids: self._answer(lookup, ids, speculate=True),
        }
        self.tokenizer = lookup.tokenizer
        self.ran_as = ran_as(lookup)
        if draft is not None:
            drafted = LLM.load(model, speculative=draft, **place_of(configuration))
            self._models.append(drafted)
            self.run["draft"] = lambda ids: self._answer(drafted, ids, speculate=True)

    def _answer(
        self, llm: LLM, ids: list[int], *, speculate: bool
    ) -> tuple[tuple[int, ...], float, dict[str, Any]]:
        session = llm.session()
        found = llm.generate(
            ids, session=session, max_new_tokens=self._tokens, ignore_eos=True, speculate=speculate
        )
        seconds = found.decode_s
        counts = found.speculation
        if counts is None:
            return found.token_ids, seconds, {}
        return (
            found.token_ids,
            seconds,
            {"passes": counts.passes, "guesses": counts.guesses, "accepted": counts.accepted},
        )

    def close(self) -> None:
        """Free the models."""
        for llm in self._models:
            llm.close()


def llama_ways(model: Path, draft: Path | None, tokens: int, threads: int) -> dict[str, Callable[..., Any]]:
    """Return llama-cpp-python's ways to decode the same weights."""
    load_plugin("llama.cpp")  # puts a checkout's engines on the path
    import llama_cpp
    from heterollm_engines.gguf_file import write_gguf
    from heterollm_engines.llama_cpp_engine import gguf_path
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    def load(folder: Path, drafting: object = None) -> Any:  # noqa: ANN401 - llama_cpp has no types
        return llama_cpp.Llama(
            str(write_gguf(folder, gguf_path(folder))),
            n_ctx=PROMPT_TOKENS + tokens + 64,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=drafting,
            verbose=False,
        )

    class Draft(LlamaDraftModel):  # type: ignore[misc]
        """Greedy tokens of a second model."""

        def __init__(self, folder: Path) -> None:
            self._llama = load(folder)

        def __call__(self, input_ids: Any, /, **_: Any) -> Any:  # noqa: ANN401 - as its base
            found = []
            for token in self._llama.generate(input_ids.tolist(), temp=0.0):
                found.append(token)
                if len(found) == LLAMA_GUESSES:
                    return np.array(found, np.intc)
            return np.array(found, np.intc)

    def way(llama: Any) -> Callable[..., Any]:  # noqa: ANN401
        def run(ids: list[int]) -> tuple[tuple[int, ...], float, dict[str, Any]]:
            llama.reset()
            found, begin = [], 0.0
            for token in llama.generate(ids, temp=0.0):
                begin = begin or time.perf_counter()
                found.append(token)
                if len(found) == tokens:
                    break
            return tuple(found), time.perf_counter() - begin, {}

        return run

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=LLAMA_GUESSES)
    ways = {f"{LLAMA} plain": way(load(model)), f"{LLAMA} lookup": way(load(model, lookup))}
    if draft is not None:
        ways[f"{LLAMA} draft"] = way(load(model, Draft(draft)))
    return ways


def answers(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of prompts and way to decode of one configuration."""
    draft: Path | None = options.draft
    if options.draft_layers:
        draft = first_layers(options.model, options.draft_layers, folder / "draft")
    ways = Ways(options.model, options.plan, draft, options.tokens)
    decoders = dict(ways.run)
    if options.llama_cpp:
        decoders |= llama_ways(options.model, draft, options.tokens, options.threads)
    for kind in options.kinds.split(","):
        prompts = prompts_of(ways.tokenizer, kind, options.prompts)
        told: dict[str, list[tuple[int, ...]]] = {name: [] for name in decoders}
        counts: dict[str, dict[str, int]] = {name: {} for name in decoders}

        def timed(name: str, counted: bool) -> float:
            seconds = 0.0
            for ids in prompts:  # noqa: B023
                tokens, own_s, own = decoders[name](ids)
                seconds += own_s
                if counted:
                    told[name].append(tokens)  # noqa: B023
                    for what, number in own.items():
                        counts[name][what] = counts[name].get(what, 0) + number  # noqa: B023
            return seconds

        rounds = Rounds(list(decoders), options.patience)
        rounds.run(options.repetitions, timed)
        decoded = len(prompts) * (options.tokens - 1)
        middle_s = {name: statistics.median(times) for name, times in rounds.seconds.items()}
        for name, own in counts.items():
            base = f"{LLAMA} plain" if name.startswith(LLAMA) else "plain"
            yield {
                "kind": "answers",
                "model": options.model.name,
                "draft": f"its first {options.draft_layers} layers" if options.draft_layers else str(draft),
                "configuration": options.plan,
                **ways.ran_as,
                "llama_threads": options.threads,
                "llama_guesses": LLAMA_GUESSES,
                "text": kind,
                "way": name,
                "tokens": options.tokens,
                "prompts": len(prompts),
                **rounds.times(name, base),
                "tokens_per_s": decoded / middle_s[name],
                "gain": middle_s[base] / middle_s[name],
                "tokens_per_pass": decoded * options.repetitions / own["passes"] if own else None,
                "acceptance": own["accepted"] / own["guesses"] if own.get("guesses") else None,
                "same_as_plain": told[name] == told[base],
            }
    ways.close()


def passes(options: argparse.Namespace, _: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tokens in one configuration."""
    with LLM.load(options.model, **place_of(options.plan)) as llm:
        session = llm.session()
        session.prefill(np.arange(options.position) % llm.config.vocab_size)

        def timed_once(length: int) -> float:
            ids = np.arange(length, dtype=np.int32)

            def run() -> float:
                begin = time.perf_counter()
                if length == 1:
                    session.decode_in_place(0)
                else:
                    session.decode_in_place(ids)
                return time.perf_counter() - begin

            found_s = llm.on_engine_thread(run)
            session.truncate(options.position)
            return found_s

        lengths = options.lengths.split(",")
        rounds = Rounds(lengths, options.patience)
        rounds.run(
            options.repetitions, lambda length, _: min(timed_once(int(length)) for _ in range(MEASURED))
        )
        one_s = statistics.median(rounds.seconds[lengths[0]])
        for length in lengths:
            middle_s = statistics.median(rounds.seconds[length])
            yield {
                "kind": "pass",
                "model": options.model.name,
                "configuration": options.plan,
                **ran_as(llm),
                "position": options.position,
                "tokens": int(length),
                "npu": any(step.processor == "npu" for step in llm.steps("decode", int(length))),
                **rounds.times(length, lengths[0]),
                "ms": middle_s * 1e3,
                "ratio": middle_s / one_s,
            }


def line_of(row: dict[str, Any]) -> str:
    """Return a row in words."""
    where = f"{row['configuration']} ({row['level']}, {row['threads']} threads)"
    disturbed = f", {sum(row['disturbed'])} of {len(row['disturbed'])} rounds disturbed"
    if row["kind"] == "pass":
        graphs = ", runs graphs" if row["npu"] else ""
        return (
            f"{where}: {row['tokens']:2} tokens {row['ms']:8.2f} ms, {row['ratio']:.2f} times one"
            f"{graphs}{disturbed}"
        )
    share = "" if row["acceptance"] is None else f", {row['acceptance']:.0%} of guesses right"
    each = "" if row["tokens_per_pass"] is None else f", {row['tokens_per_pass']:.2f} tokens a pass"
    return (
        f"{where}, {row['text']}, {row['way']}: {row['tokens_per_s']:.1f} tokens/s, {row['gain']:.2f} times "
        f"plain{each}{share}, same tokens: {row['same_as_plain']}{disturbed}"
    )


def profile_first(options: argparse.Namespace, configurations: Sequence[str]) -> None:
    """Measure what the profiles lack for the configurations."""
    for configuration in configurations:
        plan, _, threads = configuration.partition("@")
        asked = expand(
            Configuration(device="host", plan_level=plan), threads=parse_threads(threads) if threads else ()
        )
        for model in (options.model, options.draft):
            for text in () if model is None else profile_splits(model, asked):
                print(text, flush=True)


def each_by_itself(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run each configuration in a process of its own; return 1 if one failed."""
    configurations = options.plan.split(",")
    if options.profile_first:
        profile_first(options, configurations)
    failed = []
    for at, configuration in enumerate(configurations):
        own = ["--no-profile-first", "--plan", configuration, *(["--no-llama-cpp"] if at else [])]
        # The last of equal options counts.
        command = [sys.executable, __file__, *arguments, *own, "--alone"]
        if subprocess.run(command, check=False).returncode:  # noqa: S603 - this script
            failed.append(configuration)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def main() -> int:
    """Run one of the two measurements."""
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=("answers", "passes"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--plan", default="gpu@2+0,gpu@1+1,tensor@1+1,auto", help="configurations")
    parser.add_argument("--profile-first", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--kinds", default="code,prose,again", help="kinds of prompts")
    parser.add_argument("--draft", type=Path, help="folder of a draft model")
    parser.add_argument("--draft-layers", type=int, default=0, help="layers of the model that guess")
    parser.add_argument("--llama-cpp", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--position", type=int, default=256, help="tokens before the passes")
    parser.add_argument("--lengths", default=",".join(map(str, range(1, MOST_GUESSES + 2))))
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for an idle machine")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.alone:
        return each_by_itself(options, sys.argv[1:])
    run = f"{time.time_ns():x}"
    with tempfile.TemporaryDirectory() as folder:
        for row in (answers if options.what == "answers" else passes)(options, Path(folder)):
            print(line_of(row), flush=True)
            append_rows(options.out, conditions() | {"run": run} | row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
