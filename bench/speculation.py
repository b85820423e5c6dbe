"""Measures speculative decoding: answers with and without guesses, and the time of passes of several tokens.

    python bench/published_model.py /tmp/smollm2
    python bench/speculation.py answers /tmp/smollm2 --draft-layers 8 --llama-cpp --out ROWS
    python bench/speculation.py answers heterollm/data/tiny_python_lm --kinds code,again --out ROWS
    python bench/random_model.py /tmp/tinyllama
    python bench/speculation.py passes /tmp/tinyllama --out ROWS

`answers` continues code, prose, and code that is to be repeated: each prompt by plain decoding, by lookup and
by a draft, in turns, in one process. Plans other than gpu need `heterollm profile FOLDER` first. The draft is
another model of the same tokenizer (--draft), or the first layers of the model itself (--draft-layers), which
nobody trained to guess: its acceptance is that of no real draft. With --llama-cpp, llama-cpp-python's plain
decoding, its prompt lookup, and its loop around a draft, both with 10 guesses, take the next turns with the
same 4-bit weights.

`passes` times decode passes of 1 to 16 tokens behind a context, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from accuracy import TEXTS
from conditions import conditions, wait_until_idle
from sparse_prefill import first_layers

from heterollm.llm import LLM
from heterollm.text import MOST_GUESSES, Tokenizer

LLAMA_GUESSES: Final = 10
"""llama-cpp-python's default for prompt lookup."""

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


class Ways:
    """The ways to decode of one model under one plan; each has a name and a function of a prompt.

    The functions return the tokens, the seconds after the first token, and the statistics of guesses.
    """

    def __init__(self, model: Path, plan: str, draft: Path | None, tokens: int) -> None:
        self._tokens = tokens
        self._models = [LLM.load(model, device="host", plan=plan, speculative="lookup")]
        lookup = self._models[0]
        self.run: dict[str, Callable[[list[int]], tuple[tuple[int, ...], float, dict[str, Any]]]] = {
            "plain": lambda ids: self._answer(lookup, ids, speculate=False),
            "lookup": lambda ids: self._answer(lookup, ids, speculate=True),
        }
        self.tokenizer = lookup.tokenizer
        self.level = lookup.plan.level
        if draft is not None:
            drafted = LLM.load(model, device="host", plan=plan, speculative=draft)
            self._models.append(drafted)
            self.run["draft"] = lambda ids: self._answer(drafted, ids, speculate=True)

    def _answer(
        self, llm: LLM, ids: list[int], *, speculate: bool
    ) -> tuple[tuple[int, ...], float, dict[str, Any]]:
        session = llm.session()
        found = llm.generate(
            ids, session=session, max_new_tokens=self._tokens, ignore_eos=True, speculate=speculate
        )
        assert found.decode_tokens_per_s is not None
        seconds = (found.generated_tokens - 1) / found.decode_tokens_per_s
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
    ways = {"llama.cpp plain": way(load(model)), "llama.cpp lookup": way(load(model, lookup))}
    if draft is not None:
        ways["llama.cpp draft"] = way(load(model, Draft(draft)))
    return ways


def answers(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each plan, kind of prompts and way to decode."""
    draft: Path | None = options.draft
    if options.draft_layers:
        draft = first_layers(options.model, options.draft_layers, folder / "draft")
    for plan in options.plan.split(","):
        ways = Ways(options.model, plan, draft, options.tokens)
        run = dict(ways.run)
        if options.llama_cpp:
            run |= llama_ways(options.model, draft, options.tokens, options.threads)
        for kind in options.kinds.split(","):
            prompts = prompts_of(ways.tokenizer, kind, options.prompts)
            taken: dict[str, list[float]] = {name: [] for name in run}
            told: dict[str, list[tuple[int, ...]]] = {name: [] for name in run}
            counts: dict[str, dict[str, int]] = {name: {} for name in run}
            for turn in range(options.repetitions + 1):
                wait_until_idle(time.monotonic() + options.patience)
                for name, decode in run.items():
                    seconds = 0.0
                    for ids in prompts:
                        tokens, own_s, own = decode(ids)
                        seconds += own_s
                        if turn:
                            told[name].append(tokens)
                            for what, number in own.items():
                                counts[name][what] = counts[name].get(what, 0) + number
                    if turn:  # the first one compiles and learns
                        taken[name].append(seconds)
            plain_s = statistics.median(taken["plain"])
            for name, times in taken.items():
                middle_s, own = statistics.median(times), counts[name]
                decoded = len(prompts) * (options.tokens - 1)
                yield {
                    "kind": "answers",
                    "model": options.model.name,
                    "draft": f"its first {options.draft_layers} layers"
                    if options.draft_layers
                    else str(draft),
                    "plan": plan,
                    "level": ways.level,
                    "text": kind,
                    "way": name,
                    "time": "measured",
                    "tokens": options.tokens,
                    "prompts": len(prompts),
                    "seconds": times,
                    "tokens_per_s": decoded / middle_s,
                    "gain": plain_s / middle_s,
                    "tokens_per_pass": decoded * options.repetitions / own["passes"] if own else None,
                    "acceptance": own["accepted"] / own["guesses"] if own.get("guesses") else None,
                    "same_as_plain": told[name] == told["plain"],
                }
        ways.close()


def passes(options: argparse.Namespace, _: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each plan and number of tokens."""
    lengths = [int(length) for length in options.lengths.split(",")]
    for plan in options.plan.split(","):
        with LLM.load(options.model, device="host", plan=plan) as llm:
            session = llm.session()
            session.prefill(np.arange(options.position) % llm.config.vocab_size)
            taken: dict[int, list[float]] = {length: [] for length in lengths}

            def timed(length: int) -> float:
                ids = np.arange(length, dtype=np.int32)

                def run() -> float:
                    begin = time.perf_counter()
                    if length == 1:
                        session.decode_in_place(0)  # noqa: B023
                    else:
                        session.decode_several_in_place(ids)  # noqa: B023
                    return time.perf_counter() - begin

                found_s = llm.on_engine_thread(run)
                session.truncate(options.position)  # noqa: B023
                return found_s

            for turn in range(options.repetitions + 1):
                wait_until_idle(time.monotonic() + options.patience)
                for length in lengths:
                    best_s = min(timed(length) for _ in range(MEASURED))
                    if turn:
                        taken[length].append(best_s)
            one_s = statistics.median(taken[lengths[0]])
            for length, times in taken.items():
                middle_s = statistics.median(times)
                yield {
                    "kind": "pass",
                    "model": options.model.name,
                    "plan": plan,
                    "level": llm.plan.level,
                    "time": "measured",
                    "position": options.position,
                    "tokens": length,
                    "seconds": times,
                    "ms": middle_s * 1e3,
                    "ratio": middle_s / one_s,
                }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("answers", "passes"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--plan", default="gpu,tensor,auto")
    parser.add_argument("--kinds", default="code,prose,again", help="kinds of prompts")
    parser.add_argument("--draft", type=Path, help="folder of a draft model")
    parser.add_argument("--draft-layers", type=int, default=0, help="layers of the model that guess")
    parser.add_argument("--llama-cpp", action="store_true", help="measure llama-cpp-python, too")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--position", type=int, default=256, help="tokens before the passes")
    parser.add_argument("--lengths", default=",".join(map(str, range(1, MOST_GUESSES + 2))))
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for an idle machine")
    parser.add_argument("--out", type=Path, help="file of JSON lines to append to")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for row in (answers if options.what == "answers" else passes)(options, Path(folder)):
            if row["kind"] == "pass":
                print(
                    f"{row['plan']}: {row['tokens']:2} tokens {row['ms']:8.2f} ms, "
                    f"{row['ratio']:.2f} times one"
                )
            else:
                share = "" if row["acceptance"] is None else f", {row['acceptance']:.0%} of guesses right"
                each = (
                    "" if row["tokens_per_pass"] is None else f", {row['tokens_per_pass']:.2f} tokens a pass"
                )
                print(
                    f"{row['plan']}, {row['text']}, {row['way']}: {row['tokens_per_s']:.1f} tokens/s, "
                    f"{row['gain']:.2f} times plain{each}{share}, same tokens: {row['same_as_plain']}"
                )
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(conditions() | row) + "\n")


if __name__ == "__main__":
    main()
