"""The served model and the state of its server, for the doors that describe them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from heterollm.serve.admission import Admission
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.kept_responses import KeptResponses

if TYPE_CHECKING:
    from heterollm.llm import LLM


@dataclass(frozen=True, slots=True)
class About:
    """The served model and the state of its server.

    Args:
        llm: The model.
        defaults: Its name in requests, and the options of answers to requests that do not say otherwise.
        started_s: Time of the server's start, in seconds since 1970.
        admission: Knows how many requests run.
        responses: Those that later requests may continue.
    """

    llm: LLM
    defaults: RequestDefaults
    started_s: int
    admission: Admission
    responses: KeptResponses = field(default_factory=KeptResponses)

    @property
    def name(self) -> str:
        """The model's name in requests."""
        return self.defaults.name
