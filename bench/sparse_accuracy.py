"""What does sparse attention with keys by estimated scores cost a model (shadowAttn, section 5.2)?

Attention is emulated in torch: no time is measured here. It is sparse in the last quarter of a text, or in
all of it where a row says so.

    python bench/sparse_accuracy.py heads --out FILE
    python bench/sparse_accuracy.py loss,agreement,runtime --out FILE
    python bench/sparse_accuracy.py heads,importance --model FOLDER --tokens 2048 --out FILE
    python bench/sparse_accuracy.py loss,agreement,retrieval --model FOLDER --tokens 2048 --out FILE
    python bench/sparse_accuracy.py heads,loss --model FOLDER --tokens 4096 --rules mass,uniform --out FILE

`heads` calibrates as `heterollm calibrate` does, and `importance` measures equations 1 and 2. The other parts
read the rows of both in FILE. `loss` is that of the last quarter of each text, dense and sparse; `agreement`
compares selections with those of exact scores; `retrieval` asks for a number that a sentence states.
`runtime` runs heterollm itself on `host`, with its own calibration.
FILE is bench/results/sparse_accuracy.jsonl for the rows in docs/shadow-attention.md; FOLDER is made by
bench/published_model.py. Texts are the bundled held-out Python code, and the English of Python's own help.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_args

import msgspec
import numpy as np
import torch
from conditions import append_rows, origin, script_parser
from sparse_emulation import Agreement, Emulation, Sparse, by_head, scales_of
from sparse_runtime import runtime_rows
from torch import Tensor, nn
from transformers import AutoTokenizer

from heterollm.calibration.head_records import MASSES, HeadCalibration
from heterollm.calibration.head_statistics import HeadStatistics
from heterollm.data import bundled_model
from heterollm.model import ModelConfig
from heterollm.solver.sparse.keep import HeadNeeds, KeepRule, keep_ratios

KEEPS = (0.2, 0.3, 0.4, 0.5)
LONG = 4096
"""Texts of so many tokens and more have the rows of one ratio alone."""

CALIBRATION_WINDOWS = 2
"""Of each text, before those that are measured."""

VARIANTS = "variants"
"""Stands beside the rules for exact scores, buckets, and sparse attention in all of a text."""

IMPORTANCE_TOKENS = 128
"""First tokens of a calibration window of each text, on which heads are removed."""

BUNDLED_WINDOWS = 8
BUNDLED_TOKENS = 512
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SENTENCES = {
    "the secret number of the harbour master": "7416",
    "the door code of the old library": "2953",
}
"""Things that a sentence gives a number, and their numbers."""

RETRIEVAL_RULES: tuple[KeepRule, ...] = ("mass", "uniform")

Row = dict[str, Any]


class Study:
    """A model, its texts and its calibration.

    Args:
        folder: The checkpoint.
        tokens: Tokens of a text.
        known: Rows so far, from which the calibration comes.
        rules: Rules of the rows of `loss`, and :data:`VARIANTS`.
    """

    def __init__(self, folder: Path, tokens: int, known: Sequence[Row], rules: Sequence[str]) -> None:
        self._config = ModelConfig.from_folder(folder)
        self._folder, self._tokens, self._rules = folder, tokens, rules
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._emulation = Emulation(folder)
        code = (bundled_model() / "held_out.txt").read_text("utf-8")
        english = "\n\n".join(topics[name] for name in sorted(topics))
        published = folder != bundled_model()
        self._texts = {"code": self._ids(code)} | ({"english": self._ids(english)} if published else {})
        self._windows = 1 if published else BUNDLED_WINDOWS
        own = [row for row in known if row["model"] == folder.name]
        self._heads = _latest([row for row in own if row["tokens"] == tokens], "heads")
        self._importance = _latest(own, "importance")

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def _calibration(self) -> Iterator[list[int]]:
        for ids in self._texts.values():
            for at in range(0, CALIBRATION_WINDOWS * self._tokens, self._tokens):
                yield ids[at : at + self._tokens]

    def _measured(self) -> Iterator[tuple[str, list[int]]]:
        for name, ids in self._texts.items():
            first = CALIBRATION_WINDOWS * self._tokens
            for at in range(first, first + self._windows * self._tokens, self._tokens):
                yield name, ids[at : at + self._tokens]

    # -- calibration -----------------------------------------------------------------------------------

    def heads(self) -> Iterator[Row]:
        """Yield the statistics of heads, by heterollm's own calibration."""
        statistics = HeadStatistics(self._config)
        keys: dict[int, np.ndarray] = {}

        def read(layer: int, q: Tensor, k: Tensor) -> None:
            statistics.add_queries(layer, q.transpose(0, 1).reshape(q.shape[1], -1).numpy())
            keys[layer] = k.reshape(len(k), -1).numpy()

        self._emulation.reader = read
        for window in self._calibration():
            self._emulation.logits(window, 1)
            statistics.add_keys(np.stack([keys[layer] for layer in range(self._config.layers)]))
        self._emulation.reader = None
        records = msgspec.to_builtins(statistics.record())
        self._heads = {"kind": "heads", "masses": MASSES, "heads": records}
        yield self._heads

    def importance(self) -> Iterator[Row]:
        """Yield the rise of the loss without each head and layer: equations 1 and 2."""
        emulation, layers = self._emulation, self._emulation.model.model.layers
        windows = list(self._calibration())[::CALIBRATION_WINDOWS]
        inputs: dict[int, Tensor] = {}
        hooks = [
            layer.register_forward_pre_hook(lambda _, given, at=at: inputs.update({at: given[0]}))
            for at, layer in enumerate(layers)
        ]
        originals = [layer.forward for layer in layers]
        heads, whole = np.zeros((len(layers), self._config.attention.heads)), np.zeros(len(layers))
        for window in windows:
            ids = window[:IMPORTANCE_TOKENS]
            plain = _surprises(emulation.logits(ids, len(ids)), ids).mean()
            kept = dict(inputs)
            for at, layer in enumerate(layers):
                # Layers before it would give what they gave.
                layers[at - 1].forward = _skipped if at else layers[at - 1].forward
                for head in range(self._config.attention.heads):
                    layer.forward = _replaced(originals[at], kept[at])
                    emulation.removed = (at, head)
                    heads[at, head] += _surprises(emulation.logits(ids, len(ids)), ids).mean() - plain
                emulation.removed = None
                layer.forward = _replaced(_skipped, kept[at])
                whole[at] += _surprises(emulation.logits(ids, len(ids)), ids).mean() - plain
                layer.forward = originals[at]
                print(f"layer {at}", flush=True)
            for layer, original in zip(layers, originals, strict=True):
                layer.forward = original
        for hook in hooks:
            hook.remove()
        self._importance = {
            "kind": "importance",
            "heads": (heads / len(windows)).tolist(),
            "layers": (whole / len(windows)).tolist(),
        }
        yield {**self._importance, "importance_tokens": IMPORTANCE_TOKENS * len(windows)}

    @property
    def _records(self) -> list[HeadCalibration]:
        if self._heads is None:
            raise SystemExit("FILE has no row of `heads`.")
        return msgspec.convert(self._heads["heads"], list[HeadCalibration])

    def _keep(self, keep: float, rule: KeepRule) -> Tensor:
        importance = self._importance
        needs = HeadNeeds(
            MASSES,
            tuple(one.needed for one in self._records),
            importance and tuple(map(tuple, importance["heads"])),
            importance and tuple(importance["layers"]),
        )
        return torch.tensor(keep_ratios(needs, keep, rule))

    def _sparse(self, keep: float, rule: KeepRule, count: int) -> Sparse:
        return Sparse(self._keep(keep, rule), count, scales_of(self._records, count) if count else ())

    # -- what it costs ---------------------------------------------------------------------------------

    def _cases(self) -> Iterator[Row]:
        keeps = KEEPS if self._tokens < LONG else KEEPS[:1]
        for rule in (rule for rule in get_args(KeepRule) if rule in self._rules):
            for keep in keeps:
                yield {"keep": keep, "rule": rule, "buckets": 1}
        if VARIANTS in self._rules:
            for count in (5, 9, 0):
                yield {"keep": KEEPS[0], "rule": "mass", "buckets": count}
            yield {"keep": KEEPS[0], "rule": "mass", "buckets": 1, "whole": True}

    def loss(self) -> Iterator[Row]:
        """Yield the loss of the last quarter of each text, and its rise over that with dense attention."""
        last, dense = self._tokens // 4, self._tokens - self._tokens // 4
        plain: list[tuple[Tensor, Tensor]] = []
        for _, ids in self._measured():
            logits = self._emulation.logits(ids, last, dense=dense)[:-1]
            plain.append((_last_surprises(logits, ids), logits.argmax(1)))
        names = [name for name, _ in self._measured()]
        for text in self._texts:
            own = torch.cat([one for name, (one, _) in zip(names, plain, strict=True) if name == text])
            yield {"kind": "loss", "text": text, "rule": "dense", "perplexity": float(own.mean().exp())}
        for case in self._cases():
            found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
            sparse = self._sparse(case["keep"], case["rule"], case["buckets"])
            for (name, ids), (before, chosen) in zip(self._measured(), plain, strict=True):
                first = 0 if "whole" in case else dense
                logits = self._emulation.logits(ids, last, sparse, dense=first)[:-1]
                surprises = _last_surprises(logits, ids)
                row = (surprises, surprises - before, (logits.argmax(1) == chosen).double())
                found.setdefault(name, []).append(row)
            for text, parts in found.items():
                surprises, rise, agreed = (torch.cat(one) for one in zip(*parts, strict=True))
                yield {
                    "kind": "loss",
                    "text": text,
                    **case,
                    "kept_mean": float(sparse.keep.mean()),
                    "perplexity": float(surprises.mean().exp()),
                    "rise_nats": float(rise.mean()),
                    "standard_error_nats": float(rise.std() / len(rise) ** 0.5),
                    "top_1_agreement": float(agreed.mean()),
                }

    def agreement(self) -> Iterator[Row]:
        """Yield the recall of positions and of attention, for the last quarter of the queries."""
        first = KEEPS[0]
        cases: list[tuple[float, KeepRule, int]] = [(first, "uniform", 9), (first, "mass", 1)]
        cases += [(first, "uniform", 5), *((keep, "uniform", 1) for keep in reversed(KEEPS))]
        for keep, rule, count in cases:
            recalls, masses = [], []
            for _, ids in self._measured():
                sparse = self._sparse(keep, rule, count)
                sparse.agreement = Agreement()
                self._emulation.logits(ids, 1, sparse, dense=self._tokens - self._tokens // 4)
                recalls.append(by_head(sparse.agreement.recall))
                masses.append(by_head(sparse.agreement.mass))
            # Heads whose keys are all kept anyway have no recall.
            recall, mass = np.ma.masked_invalid(recalls).mean(axis=0), np.mean(masses, axis=0)
            yield {
                "kind": "agreement",
                "keep": keep,
                "rule": rule,
                "buckets": count,
                "recall": float(recall.mean()),
                "worst_recall": float(recall.min()),
                "mass": float(mass.mean()),
                "worst_mass": float(mass.min()),
            }

    def runtime(self) -> Iterator[Row]:
        """Yield the rise of the loss in heterollm itself."""
        yield from runtime_rows(self._folder, [ids for _, ids in self._measured()])

    def retrieval(self) -> Iterator[Row]:
        """Yield whether greedy decoding gives the number that a sentence states; prompts are sparse."""
        if self._tokenizer.chat_template is None:
            raise SystemExit("retrieval needs a model that answers questions.")
        ways: dict[str, Sparse | None] = {"dense": None}
        ways |= {rule: self._sparse(KEEPS[0], rule, 1) for rule in RETRIEVAL_RULES}
        for (thing, number), depth in itertools.product(SENTENCES.items(), DEPTHS):
            prompt, answer = self._question(thing, number, depth), self._ids(number)
            for rule, how in ways.items():
                logits = self._emulation.logits([*prompt, *answer], len(answer) + 1, how)[:-1]
                surprise = nn.functional.cross_entropy(logits, torch.tensor(answer))
                yield {
                    "kind": "retrieval",
                    "depth": depth,
                    "sentence": thing,
                    "rule": rule,
                    "keep": 1.0 if how is None else KEEPS[0],
                    "prompt_tokens": len(prompt),
                    "found": bool((logits.argmax(1) == torch.tensor(answer)).all()),
                    "nats": float(surprise),
                }

    def _question(self, thing: str, number: str, depth: float) -> list[int]:
        """Return a prompt with a sentence at a depth, a question for its number and how its answer begins."""
        begin = f"{thing[0].upper()}{thing[1:]} is "
        fact = self._ids(f"\n\n{begin}{number}. Remember it.\n\n")
        filler = self._texts["english"][CALIBRATION_WINDOWS * self._tokens :]
        room = self._tokens - len(fact) - 64
        at = int(depth * room)
        text = self._tokenizer.decode([*filler[:at], *fact, *filler[at:room]])
        chat = [{"role": "user", "content": f"{text}\n\nWhat is {thing}?"}]
        asked = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self._ids(asked + begin)


def _skipped(hidden: Tensor, *_: object, **__: object) -> Tensor:
    return hidden


def _replaced(forward: Callable[..., Tensor], hidden: Tensor) -> Callable[..., Tensor]:
    return lambda _, *given, **named: forward(hidden, *given, **named)


def _surprises(logits: Tensor, ids: Sequence[int]) -> Tensor:
    return nn.functional.cross_entropy(logits[:-1], torch.tensor(list(ids)[1:]), reduction="none")


def _last_surprises(logits: Tensor, ids: Sequence[int]) -> Tensor:
    return nn.functional.cross_entropy(logits, torch.tensor(list(ids)[-len(logits) :]), reduction="none")


def _latest(rows: Sequence[Row], kind: str) -> Row | None:
    return next((row for row in reversed(rows) if row["kind"] == kind), None)


def main() -> None:
    """Print the rows and append them."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("parts", help="heads, importance, loss, agreement, runtime, retrieval")
    parser.add_argument("--model", type=Path, default=bundled_model(), help="default: bundled")
    parser.add_argument("--tokens", type=int, default=BUNDLED_TOKENS, help="of a text")
    parser.add_argument("--rules", default=",".join((*get_args(KeepRule), VARIANTS)), help="of keep ratios")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended here")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    stated = origin("sparse_accuracy")
    stated |= {"emulated": True, "model": asked.model.name, "tokens": asked.tokens}
    lines = asked.out.read_text("utf-8").splitlines() if asked.out.exists() else []
    study = Study(asked.model, asked.tokens, [json.loads(line) for line in lines], asked.rules.split(","))
    for part in asked.parts.split(","):
        begin = time.perf_counter()
        for row in getattr(study, part)():
            row |= {"seconds": time.perf_counter() - begin}
            begin = time.perf_counter()
            words = (
                f"{value:.4g}" if isinstance(value, float) else str(value)[:40] for value in row.values()
            )
            print(" | ".join(words), flush=True)
            append_rows(asked.out, {**stated, **row})


if __name__ == "__main__":
    main()
