"""The options of answers to requests that do not say otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from heterollm.serve.options import ServeOptions
from heterollm.text import GenerationOptions, SamplingOptions

if TYPE_CHECKING:
    from heterollm.llm import LLM

LLAMA_CPP: Final[Mapping[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""The sampling of llama.cpp (`common/common.h`), for checkpoints that recommend none."""


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """The options of answers to requests that do not say otherwise.

    Args:
        name: The model's name in requests.
        sampling: Sampling parameters, by name.
        max_tokens: Tokens of an answer at most; None for as many as the context holds.
        source: Where the sampling comes from.
    """

    name: str
    sampling: Mapping[str, Any]
    max_tokens: int | None
    source: str

    @classmethod
    def of(cls, llm: LLM, options: ServeOptions) -> Self:
        """Return the defaults of a server: its options', else the checkpoint's, else those of llama.cpp.

        Raises:
            OptionError: A value is outside its range.
        """
        stated = llm.sampling_defaults
        own = {
            name: getattr(stated, name)
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            if getattr(stated, name) is not None
        }
        if stated.do_sample is False:
            own["temperature"] = 0.0
        source = "as the checkpoint recommends" if own else "as llama.cpp does without a recommendation"
        if options.sampling:
            source += ", but for the options of the server"
        sampling = {**(own or LLAMA_CPP), **options.sampling}
        GenerationOptions(sampling=SamplingOptions(**sampling), max_new_tokens=options.max_tokens)
        return cls(options.name, sampling, options.max_tokens, source)

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
        limit = "" if self.max_tokens is None else f", max_tokens {self.max_tokens}"
        return f"Requests without sampling parameters have {values}{limit}: {self.source}."
