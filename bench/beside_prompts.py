"""Measures a new prompt under load: its time to the first token, and the tokens of running answers meanwhile.

Decode passes of the answers take turns with the prompt's chunk, or their kernels run beside its NPU graphs.

    python bench/beside_prompts.py simulated llama-3-8b --plans layer,tensor
    python bench/random_model.py /tmp/small --layers 4
    python bench/beside_prompts.py host /tmp/small --plans layer

`simulated` has the clock of a simulated SoC, and computes nothing. `host` has real kernels, graphs and times;
turns and passes beside alternate there, and the medians of all rounds count. It needs idle cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from conditions import append_rows, conditions, origin, script_parser
from speculation_simulated import Simulated

from heterollm.engine import Engine, PromptTask, Scheduler, Session
from heterollm.llm import LLM
from heterollm.text import GenerationOptions, GenerationStep, NoTokenizer, TokenSequence

Row: TypeAlias = dict[str, Any]

CONTEXT: Final = 4096

BEFORE: Final = 12
"""Tokens of each answer before the prompt: the passes have times then."""


class Task(PromptTask):
    """A prompt with one answer that has no end, and the times of its tokens."""

    def __init__(self, answer: TokenSequence, session: Session, now_s: Callable[[], float]) -> None:
        super().__init__("default", [answer], reproducible=False)
        self._session, self._now_s = session, now_s
        self.times_s: list[float] = []
        self.error: Exception | None = None

    is_slow = False

    def take_session(self) -> Session:
        """Return the empty session."""
        return self._session

    def copy_session(self) -> Session:
        """Fail: there is one answer."""
        raise AssertionError

    def put(self, _number: int, steps: Sequence[GenerationStep], _seconds: float, /) -> None:
        """Note the time."""
        self.times_s += [self._now_s()] * len(steps)

    def fail(self, error: Exception, /) -> None:
        """Note the error."""
        self.error = error

    def read(self, _seconds: float, /) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Load:
    """Running answers, beside which prompts are read."""

    def __init__(self, scheduler: Scheduler, begin: Callable[[int], Task], count: int, context: int) -> None:
        self._scheduler = scheduler
        self._begin = begin
        self._answers = [begin(context) for _ in range(count)]
        for task in self._answers:
            scheduler.add(task)
        while any(len(task.times_s) < BEFORE for task in self._answers):
            self._step(*self._answers)

    def _step(self, *tasks: Task) -> None:
        assert self._scheduler.step()
        for task in tasks:
            if task.error is not None:
                raise task.error

    def read(self, tokens: int, now_s: Callable[[], float]) -> dict[str, float]:
        """Read a prompt, and return its time to the first token, and rate and longest gap of the others."""
        for _ in range(BEFORE if self._answers else 0):
            self._step(*self._answers)
        held, begin_s = [len(task.times_s) for task in self._answers], now_s()
        prompt = self._begin(tokens)
        self._scheduler.add(prompt)
        while not prompt.times_s:
            self._step(prompt, *self._answers)
        took_s = prompt.times_s[0] - begin_s
        prompt.cancelled = True
        new = sum(len(task.times_s) - count for task, count in zip(self._answers, held, strict=True))
        times_s = [task.times_s[count - 1 :] for task, count in zip(self._answers, held, strict=True)]
        gaps_s = [float(np.diff(own).max()) for own in times_s if len(own) > 1]
        self._step()
        return {"ttft_s": took_s, "tokens_per_s": new / took_s, "gap_s": max(gaps_s, default=took_s)}


def rows_of(engine: Engine, session: Callable[[], Session], options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row of a prompt alone, of one with turns, and of one with passes beside it."""
    thread: Any = types.SimpleNamespace(background=[], submit=lambda call: call())
    now_s = engine.device.now_s

    def begin(tokens: int) -> Task:
        asked = GenerationOptions(ignore_eos=True)
        ids = np.arange(1, tokens + 1, dtype=np.int32) % engine.vocab_size
        tokenizer = NoTokenizer(Path(), frozenset())
        answer = TokenSequence(tokenizer, ids, asked, context=engine.context, clock=now_s)
        return Task(answer, session(), now_s)

    def load(answers: int, *, beside: bool) -> Load:
        scheduler = Scheduler(thread, now_s, engine.rows, gpu=engine.device.gpu, beside=beside)
        return Load(scheduler, begin, answers, options.context)

    loads = {
        "alone": load(0, beside=False),
        "turns": load(options.answers, beside=False),
        "beside": load(options.answers, beside=True),
    }
    found = defaultdict[str, list[dict[str, float]]](list)
    for number in range(options.rounds + 1):  # the first one compiles
        for how, own in loads.items():
            row = own.read(options.prompt, now_s)
            if number:
                found[how].append(row)
    for how, rows in found.items():
        medians = {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
        fixed = {"prompt": options.prompt, "answers": options.answers, "context": options.context}
        yield {"how": how, **fixed, "rounds": options.rounds, **medians}


def simulated(options: argparse.Namespace, level: str) -> Iterator[Row]:
    """Yield the rows of a plan level on a simulated SoC."""
    made = Simulated(options.model, options.soc, level, CONTEXT)
    thread: Any = types.SimpleNamespace(run=lambda call: call())
    fixed = {**origin("beside_prompts"), "model": options.model, "soc": options.soc, "plan": level}
    for row in rows_of(made.engine, lambda: Session(made.engine, thread, made.engine.vocab_size), options):
        yield fixed | row


def on_host(options: argparse.Namespace, level: str) -> Iterator[Row]:
    """Yield the rows of a plan level or file on `host`."""
    fixed = {"bench": "beside_prompts", **conditions(), "model": Path(options.model).name}
    with LLM.load(options.model, device="host", plan=level, context=CONTEXT) as llm:
        engine = llm._engine  # noqa: SLF001 - a scheduler without passes beside prompts
        rows = llm.on_engine_thread(lambda: list(rows_of(engine, llm.session, options)))
    for row in rows:
        yield fixed | {"plan": Path(level).name} | row


def main() -> int:
    """Run the bench."""
    parser = script_parser(__doc__)
    parser.add_argument("where", choices=["simulated", "host"])
    parser.add_argument("model")
    parser.add_argument("--plans", default="gpu,layer,tensor", help="levels or files, separated by commas")
    parser.add_argument("--soc", default="snapdragon-8gen3")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the new prompt")
    parser.add_argument("--answers", type=int, default=4, help="running answers")
    parser.add_argument("--context", type=int, default=256, help="tokens of their prompts")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for level in options.plans.split(","):
        for row in (simulated if options.where == "simulated" else on_host)(options, level):
            print(
                f"{level:7} {row['how']:7} first token after {row['ttft_s']:7.3f} s, {row['answers']} answers"
                f"{row['tokens_per_s']:8.2f} tokens/s, longest gap {row['gap_s']:6.3f} s",
                flush=True,
            )
            append_rows(options.out, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
