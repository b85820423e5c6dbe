"""Many requests at once: shares of the engine, priorities, reuse, limits, and clients that leave or stall."""

import contextlib
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from faults import failing_graphs

from heterollm.engine import ServiceTier, Session
from heterollm.llm import LLM
from heterollm.serve.admission import Admission, BusyError
from heterollm.serve.answers import Ended, ServedPrompt, StepOf
from heterollm.serve.sessions import SessionCache
from heterollm.serve.status import Activity

LONG = "def f(x):\n    return x + 1\n\n" * 8
"""More than one chunk of the prompt, and less than two."""

HANG_S = 600.0


def health(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}/health") as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def until(address: str, **state: int) -> None:
    """Wait until the server is in a state."""
    ends = time.monotonic() + HANG_S
    while health(address) | state != health(address):
        assert time.monotonic() < ends
        time.sleep(0.01)


def complete(client: openai.OpenAI, prompt: str, **options: Any) -> tuple[str, int]:
    """Return the text of a completion, and the number of reused tokens."""
    answer = client.completions.create(model="tiny", prompt=prompt, **{"max_tokens": 12, **options})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0


def test_answers_under_load_are_those_without_load(llm: LLM, client: openai.OpenAI) -> None:
    """Whatever runs beside them, and whatever sessions hold already."""
    prompts = [LONG[:40], LONG, LONG[:180]] * 4
    options = [{"seed": number} if number % 4 else {"temperature": 0.0} for number in range(12)]
    # The bundled model recommends no sampling, so that a request without it has llama.cpp's.
    sampled: Any = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    tiers: Any = ["default", "flex", "priority"]
    expected = [
        llm.generate(
            prompt,
            max_new_tokens=12,
            session=llm.session(),
            **({**sampled, **chosen} if "seed" in chosen else chosen),
        ).text
        for prompt, chosen in zip(prompts, options, strict=True)
    ]

    def ask(number: int) -> str:
        return complete(
            client, prompts[number], extra_body={"service_tier": tiers[number % 3]}, **options[number]
        )[0]

    with ThreadPoolExecutor(12) as pool:
        for _ in range(2):
            assert list(pool.map(ask, range(12))) == expected


def test_prompts_reuse_what_they_share(client: openai.OpenAI, llm: LLM) -> None:
    chunk = llm.plan.chunk_length
    assert chunk < len(llm.tokenizer.encode(LONG)) < 2 * chunk
    first, _ = complete(client, LONG + "a = 1", temperature=0)
    again, cached = complete(client, LONG + "a = 1", temperature=0)
    assert (again, cached) == (first, chunk)
    # Another prompt shares the chunk; one that samples freely shares every equal token.
    assert complete(client, LONG + "b = 2", seed=1)[1] == chunk
    assert complete(client, LONG + "a = 1")[1] > chunk


class Events(list[Any]):
    """A channel that keeps the order of the events of several tasks."""

    full = False

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__()
        self.name, self.order = name, order
        self.ended = threading.Event()

    def put(self, event: Any, /, *, urgent: bool = True) -> None:
        self.append(event)
        self.order.append(self.name)
        if not isinstance(event, StepOf):
            self.ended.set()


class Tasks:
    """Makes tasks of one model, and admits them."""

    def __init__(self, llm: LLM) -> None:
        self.scheduler = llm.scheduler()
        self.admission = Admission(self.scheduler, places=3, queue=2)
        self._llm = llm
        self._cache = SessionCache(llm.session, most=3, chunk=llm.plan.chunk_length, failures=lambda: ())

    def make(self, tier: ServiceTier, prompt: str, events: Events, kind: Any = ServedPrompt) -> ServedPrompt:
        task: ServedPrompt = kind(
            *(tier, (self._llm.prepare(prompt, max_new_tokens=5, ignore_eos=True),)),
            first=0,
            reproducible=True,
            owner="",
            cache=self._cache,
            channel=events,
            activity=Activity(),
            report=lambda _: None,
            ended=self.admission.ended,
        )
        return task


@pytest.fixture
def tasks(llm: LLM) -> Iterator[Tasks]:
    made = Tasks(llm)
    yield made
    made.admission.close()


def test_an_urgent_request_does_not_wait_for_a_long_prompt(llm: LLM, tasks: Tasks) -> None:
    """It runs to its end between two layers of the other's first chunk."""
    order: list[str] = []
    read: list[float] = []
    short_events, long_events = Events("short", order), Events("long", order)
    short = tasks.make("priority", "import ", short_events)

    class Interrupted(ServedPrompt):
        def take_session(self) -> Session:
            tasks.admission.submit([short])
            return super().take_session()

        @property
        def is_slow(self) -> bool:
            read.append(self.read_fraction)
            return False

    tasks.admission.submit([tasks.make("flex", LONG, long_events, Interrupted)])
    assert long_events.ended.wait(HANG_S)
    assert order == ["short"] * 6 + ["long"] * 6
    assert 0 < min(filter(None, read)) < llm.plan.chunk_length / len(llm.tokenizer.encode(LONG))
    for events, prompt in ((short_events, "import "), (long_events, LONG)):
        assert all(isinstance(event, StepOf) for event in events[:-1])
        assert isinstance(events[-1], Ended)
        expected = llm.generate(prompt, max_new_tokens=5, ignore_eos=True, session=llm.session())
        assert events[-1].result.token_ids == expected.token_ids


def test_a_slow_reader_waits_alone(tasks: Tasks) -> None:
    order: list[str] = []
    slow, quick = Events("slow", order), Events("quick", order)
    slow.full = True
    tasks.admission.submit([tasks.make("priority", "import ", slow)])
    tasks.admission.submit([tasks.make("flex", "import ", quick)])
    assert quick.ended.wait(HANG_S)
    slow.full = False
    tasks.scheduler.wake()
    assert slow.ended.wait(HANG_S)
    assert order == ["quick"] * 6 + ["slow"] * 6


def test_tasks_beyond_the_limit_are_refused_and_the_last_place_is_for_urgent_ones(tasks: Tasks) -> None:
    closed = [Events(str(number), []) for number in range(5)]
    for events in closed:
        events.full = True
    made = [tasks.make("default", "import ", events) for events in closed]
    admission = tasks.admission
    admission.submit(made[:1])
    admission.submit(made[1:2])
    admission.submit(made[2:4])
    assert admission.counts() == (2, 2)
    with pytest.raises(BusyError, match="2 requests wait") as caught:
        admission.submit(made[4:])
    assert caught.value.retry_s >= 1
    urgent = Events("urgent", [])
    admission.submit([tasks.make("priority", "import ", urgent)])
    assert urgent.ended.wait(HANG_S)
    # One that waits and is cancelled leaves at once.
    admission.cancel(made[3:4])
    assert admission.counts()[1] == 1
    admission.close()
    assert [len(events) for events in closed] == [1, 1, 1, 0, 0]
    with pytest.raises(BusyError, match="stops"):
        admission.submit(made[4:])


def test_a_call_to_the_engine_does_not_wait_for_an_answer(llm: LLM, tasks: Tasks) -> None:
    events = Events("answer", [])
    task = tasks.make("default", "import ", events)

    def count() -> int:
        return len(events)

    def begin() -> None:
        tasks.admission.submit([task])

    llm.on_engine_thread(begin)
    counts = [llm.on_engine_thread(count) for _ in range(3)]
    assert counts[0] < 5
    assert events.ended.wait(HANG_S)


def test_a_full_server_says_when_to_come_again(
    llm: LLM, serving: Callable[..., contextlib.AbstractContextManager[str]]
) -> None:
    gate, holds = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        gate.wait(HANG_S)

    holder = threading.Thread(target=llm.on_engine_thread, args=(hold,))
    with serving(llm, places=1, queue=1) as address, ThreadPoolExecutor(2) as pool:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
        holder.start()
        assert holds.wait(HANG_S)
        asked = [pool.submit(complete, client, "import ")]
        until(address, running=1)
        asked.append(pool.submit(complete, client, "import "))
        until(address, waiting=1)
        with pytest.raises(openai.InternalServerError) as caught:
            complete(client, "import ")
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        gate.set()
        for one in asked:
            assert one.result(HANG_S)[0]
    holder.join()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(client: openai.OpenAI, address: str, stream: bool) -> None:
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as gone:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        gone.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        until(address, running=1)
        if stream:
            assert gone.recv(100)
    until(address, running=0)
    assert complete(client, "import ", temperature=0)[0]


def test_a_failing_npu_is_an_error_or_leaves_the_work_to_the_gpu(
    bundled_model: Any,
    serving: Callable[..., contextlib.AbstractContextManager[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails = failing_graphs(monkeypatch)
    for allowed in (False, True):
        fails.clear()
        options: Any = {"device": "host", "plan": "layer", "allow_fallback": allowed}
        with LLM.load(bundled_model, **options) as llm, serving(llm) as address:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
            text, _ = complete(client, "import os\n" * 8, temperature=0)
            fails.set()
            if allowed:
                assert complete(client, "import os\n" * 8, temperature=0)[0] == text
                assert llm.failures
                continue
            with pytest.raises(openai.InternalServerError, match="the device is gone"):
                complete(client, "import os\n" * 8, temperature=0)
            with pytest.raises(urllib.error.HTTPError, match="503"):
                health(address)
            fails.clear()
            assert complete(client, "import os\n" * 8, temperature=0)[0] == text
            assert health(address)["status"] == "ok"
