"""Counters for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from heterollm.serve.answers import Spent

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The counters of one server, named ``heterollm_…``.

    Args:
        counts: Returns the numbers of running and waiting requests, of sessions, of failures of the NPU, of
            decode passes and of their rows.
    """

    def __init__(self, counts: Callable[[], tuple[int, ...]]) -> None:
        self._counts = counts
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "heterollm_requests", "Answered requests.", ["path", "status"], registry=registry
        )
        self._aborted = Counter(
            "heterollm_aborted", "Requests whose client left while they were computed.", registry=registry
        )
        self._prompt = Counter("heterollm_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached = Counter(
            "heterollm_cached_tokens", "Tokens of prompts that a session held.", registry=registry
        )
        self._generated = Counter("heterollm_generated_tokens", "Tokens of answers.", registry=registry)
        self._prefill = Counter("heterollm_prefill_seconds", "Time of prompts.", registry=registry)
        self._decode = Counter("heterollm_decode_seconds", "Time of tokens.", registry=registry)
        self._passes = Counter(
            "heterollm_speculative_passes", "Passes of answers with guesses.", registry=registry
        )
        self._guesses = Counter("heterollm_guesses", "Guesses that passes checked.", registry=registry)
        self._accepted = Counter("heterollm_accepted_guesses", "Right guesses.", registry=registry)
        self._queued = Histogram(
            "heterollm_queued_seconds", "Time until the first turn.", buckets=SECONDS, registry=registry
        )
        self._gauges = [
            Gauge(f"heterollm_{name}", text, registry=registry)
            for name, text in (
                ("running", "Prompts that run."),
                ("waiting", "Prompts that wait."),
                ("sessions", "Sessions in memory."),
                ("npu_failures", "Failures of the NPU after which the GPU computes alone."),
                ("decode_passes", "Passes that computed tokens of answers."),
                ("decode_rows", "Answers in these passes, one or several in each."),
            )
        ]

    def answered(self, path: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(path, status).inc()

    def aborted(self) -> None:
        """Count a request whose client left while it was computed."""
        self._aborted.inc()

    def spent(self, spent: Spent) -> None:
        """Add the tokens and times of a request."""
        self._prompt.inc(spent.prompt_tokens)
        self._cached.inc(spent.cached_tokens)
        self._generated.inc(spent.answer_tokens)
        self._prefill.inc(spent.prefill_s)
        self._decode.inc(spent.decode_s)
        self._queued.observe(spent.queued_s)
        if (counts := spent.speculation) is not None:
            self._passes.inc(counts.passes)
            self._guesses.inc(counts.guesses)
            self._accepted.inc(counts.accepted)

    def text(self) -> bytes:
        """Return the counters in Prometheus' text format."""
        for gauge, value in zip(self._gauges, self._counts(), strict=True):
            gauge.set(value)
        return generate_latest(self._registry)
