"""A draft model that guesses for a model, or lookup in the text: their plan, and the speculator of a load."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from heterollm.base import GIB, OptionError, PlanError, Progress
from heterollm.engine import (
    DraftSpeculator,
    EngineThread,
    Session,
    check_memory,
    longest_guessed_pass,
    measured_pass_s,
)
from heterollm.loading import PlannedModel, SourceModel
from heterollm.model import Checkpoint
from heterollm.planning import LOAD_OPTIONS, LOOKUP, choose_context, predicted_pass_s
from heterollm.solver import LEVELS, SOLVED_LEVELS, PlanRequest
from heterollm.text import (
    CHOSEN_GUESSES,
    LOOKUP_PRIORS,
    GuessPace,
    LookupProposer,
    NoTokenizer,
    Speculator,
    Tokenizer,
)
from heterollm.trace import take_trace

if TYPE_CHECKING:
    from heterollm.engine import Engine


def planned_draft(main: PlannedModel, thread: EngineThread) -> PlannedModel | None:
    """Return the planned draft model of a load, and check that both fit; None without one.

    Both models take turns on the device. The draft's NPU graphs get the memory that the model's leave.

    Raises:
        OptionError: The draft has another tokenizer.
        DeviceError: The memory does not suffice for both.
        PlanError: The NPU cannot hold the graphs of both.
    """
    asked, device = main.asked, main.device
    if asked.speculative in (None, LOOKUP):
        check_memory(main.need)
        return None
    assert asked.speculative is not None
    source = SourceModel.of(Checkpoint(asked.speculative))
    _check_tokenizers(main.source, source)
    level = asked.plan if asked.plan in (*LEVELS, *SOLVED_LEVELS) else "auto"
    limit = None if device.npu is None else device.npu.addressable_bytes
    left = None if limit is None else max(0, limit - main.need.npu_graphs)
    own = replace(
        asked,
        speculative=None,
        guesses=None,
        plan=level,
        request=None if left is None else PlanRequest(npu_gib=left / GIB),
        precision="w4a16" if asked.precision == "w8a8" else asked.precision,
        scales="free",
        calibration=None,
        experts_gib=None,
        trace=False,
        defaults=LOAD_OPTIONS,  # nobody gave them for the draft
    )
    context = min(main.context, choose_context(source.config, None))
    draft = PlannedModel.of(source, own, device, thread, context)
    if left is not None and draft.need.npu_graphs > left:
        raise PlanError(
            f"The NPU holds {limit} bytes of graphs; the model's plan takes {main.need.npu_graphs} and the "
            f"draft's {draft.need.npu_graphs}.",
            fix="Choose plan auto or gpu, or a smaller draft.",
        )
    check_memory(replace(main.need, draft=draft.need.total))
    return draft


def speculator_of(
    main: PlannedModel, engine: Engine, draft: Engine | None, thread: EngineThread, report: Progress
) -> Speculator | None:
    """Return the speculator of a loaded model; None without speculative decoding.

    Without predictions from a profile it measures passes. Called on the engine thread.

    Args:
        main: The model.
        engine: Its engine.
        draft: The engine of its draft, if it has one.
        thread: The thread of both.
        report: Called while passes compile.
    """
    asked = main.asked
    if asked.speculative is None:
        return None
    longest = longest_guessed_pass(engine)
    counts = CHOSEN_GUESSES if asked.guesses is None else range(1, asked.guesses + 1)
    lengths = [1, *(count + 1 for count in counts if count < longest)]
    engine.compile_ahead(engine.new_cache(), (), report, decode=lengths)
    pass_s = predicted_pass_s(main.inputs, main.plan, longest) or measured_pass_s(engine, longest)
    # Neither counts nor a trace know of these passes.
    engine.reset_counts()
    if engine.observer is not None:
        take_trace(engine)
    if draft is None:
        pace = GuessPace(pass_s, LOOKUP_PRIORS, fixed=asked.guesses)
        return lambda *_: LookupProposer(pace)
    drafting, vocab_size = draft, draft.vocab_size

    def new_session() -> Session:
        return Session(drafting, thread, vocab_size)

    guess_s = measured_pass_s(draft, 1)[0]
    return DraftSpeculator(pass_s, guess_s, asked.guesses, new_session)


def _check_tokenizers(main: SourceModel, draft: SourceModel) -> None:
    """Refuse a draft whose ids stand for other texts.

    Raises:
        OptionError: One has no tokenizer, or they have different ones.
    """
    for one in (main, draft):
        if isinstance(one.tokenizer, NoTokenizer):
            raise OptionError(
                f"{one.checkpoint.folder} has no tokenizer, so that model and draft cannot be compared.",
                fix=f"Use --speculative {LOOKUP}.",
            )
    assert isinstance(main.tokenizer, Tokenizer)
    assert isinstance(draft.tokenizer, Tokenizer)
    ours, theirs = main.tokenizer.vocabulary, draft.tokenizer.vocabulary
    if ours != theirs:
        other = len(ours.items() ^ theirs.items())
        raise OptionError(
            f"The draft model {draft.checkpoint.folder} has another tokenizer: {len(theirs)} tokens beside "
            f"{len(ours)}, of which {other} differ.",
            fix=f"Give a smaller model of the same family, or --speculative {LOOKUP}.",
        )
