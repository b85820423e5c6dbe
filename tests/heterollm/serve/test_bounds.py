"""The limits of a server: each bites, and none is met by a client that behaves."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from heterollm.llm import LLM
from heterollm.serve import connections, reading
from heterollm.serve.errors import RequestError
from heterollm.serve.reading import check_values

HANG_S = 600.0
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
Serving = Callable[..., contextlib.AbstractContextManager[str]]


def connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)))
    made.settimeout(HANG_S)
    return made


def closed(connection: socket.socket) -> bool:
    """Wait for the server's end of a connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def ask(address: str, prompt: str = "import ", **options: Any) -> str:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=2, **options).choices[0].text


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes connections early."""
    monkeypatch.setattr(connections, "IDLE_S", 0.2)
    monkeypatch.setattr(connections, "STALL_S", 0.2)
    monkeypatch.setattr(connections, "CHECK_S", 0.02)


def test_connections_without_a_whole_head_end(llm: LLM, serving: Serving, impatient: None) -> None:
    with serving(llm) as address, contextlib.ExitStack() as stack:
        silent, slow, late, refused = (stack.enter_context(connect(address)) for _ in range(4))
        late.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert late.recv(1 << 16)
        # The answer comes before the body, which never ends.
        refused.sendall(f"{HEAD.replace('json', 'text')}Content-Length: 99\r\n\r\n".encode())
        assert b"415" in refused.recv(1 << 16)
        ended = threading.Event()

        def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while not ended.wait(0.01):
                    for one in (slow, late, refused):
                        one.sendall(b"G")

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert all(map(closed, (silent, slow, late, refused)))
        ended.set()
        dripping.join()
        assert ask(address)


def test_an_answer_that_takes_longer_than_a_rest_arrives(
    llm: LLM, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while the engine computes, nor while the body comes, the connection rests."""
    monkeypatch.setattr(connections, "IDLE_S", 0.05)
    monkeypatch.setattr(connections, "CHECK_S", 0.01)
    gate = threading.Event()
    holder = threading.Thread(target=llm.on_engine_thread, args=(lambda: gate.wait(HANG_S),))
    body = json.dumps({"model": "tiny", "prompt": "import ", "max_tokens": 2}).encode()
    with serving(llm) as address, connect(address) as one:
        one.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode())
        time.sleep(0.3)
        holder.start()
        one.sendall(body)
        time.sleep(0.3)
        gate.set()
        assert b"200 OK" in one.recv(1 << 16)
    holder.join()


def test_idle_connections_make_room_for_requests(llm: LLM, serving: Serving) -> None:
    with serving(llm, connections=8) as address, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(address)) for _ in range(40)]
        unfinished = [stack.enter_context(connect(address)) for _ in range(20)]
        for one in unfinished:
            with contextlib.suppress(ConnectionError):
                one.sendall(f"{HEAD}Content-Length: 99\r\n\r\n{{".encode())
        assert ask(address)
        assert all(map(closed, idle))
        assert all(map(closed, unfinished[:8]))


def test_a_running_request_keeps_its_connection(llm: LLM, serving: Serving) -> None:
    gate = threading.Event()
    holder = threading.Thread(target=llm.on_engine_thread, args=(lambda: gate.wait(HANG_S),))
    with (
        serving(llm, connections=4) as address,
        ThreadPoolExecutor(1) as pool,
        contextlib.ExitStack() as stack,
    ):
        holder.start()
        asked = pool.submit(ask, address)
        while b'"running":1' not in health(address):
            time.sleep(0.01)
        idle = [stack.enter_context(connect(address)) for _ in range(40)]
        assert closed(idle[0])
        gate.set()
        assert asked.result(HANG_S)
    holder.join()


def health(address: str) -> bytes:
    with connect(address) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        found = b""
        while part := one.recv(1 << 16):
            found += part
        return found


def test_a_client_that_does_not_read_loses_its_connection(
    llm: LLM, serving: Serving, impatient: None
) -> None:
    with serving(llm) as address, socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = address.removeprefix("http://").partition(":")
        one.connect((host, int(port)))
        pages = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
        # The server reads no more of them once it cannot write, and then gives up.
        one.settimeout(HANG_S)
        with pytest.raises(ConnectionError):
            one.sendall(pages * 100)
        assert ask(address)


def test_a_head_has_a_limit_that_long_headers_do_not_reach(address: str) -> None:
    for size, status in ((12_000, b"200 OK"), (200_000, b"400 Bad Request")):
        with connect(address) as one:
            head = f"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: {'a' * size}\r\n\r\n"
            with contextlib.suppress(ConnectionError):
                one.sendall(head.encode())
            assert status in one.recv(1 << 16)


def test_tiny_chunks_share_the_loop_and_then_end(
    llm: LLM, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_PARSE_S", 0.1)
    rounds: list[float] = []
    begin_round = connections._Parsing._begin_round

    def timed(parsing: Any, loop: Any) -> None:
        begin_s = time.thread_time()
        begin_round(parsing, loop)
        rounds.append(time.thread_time() - begin_s)

    monkeypatch.setattr(connections._Parsing, "_begin_round", timed)
    with serving(llm) as address, contextlib.ExitStack() as stack:
        attackers = [stack.enter_context(connect(address)) for _ in range(8)]
        body = json.dumps({"model": "tiny", "prompt": "import ", "max_tokens": 2}).encode()

        def send(one: socket.socket) -> None:
            with contextlib.suppress(ConnectionError):
                one.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\na\r\n" * 50_000)

        with ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(send, one) for one in attackers]
            # A few chunks are no attack.
            with connect(address) as one:
                parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:]))
                one.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + parts + b"0\r\n\r\n")
                assert b"200 OK" in one.recv(1 << 16)
            for each in sent:
                each.result(HANG_S)
        assert all(map(closed, attackers))
    # One piece may take longer than the round has left.
    assert sorted(rounds)[len(rounds) // 2] < 20 * connections.PARSE_S


def test_unfinished_bodies_have_a_limit_and_the_oldest_lose(
    llm: LLM, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 200_000
    monkeypatch.setattr(reading, "MOST_BODIES_BYTES", 3 * size)
    monkeypatch.setattr(reading.Bodies.__init__, "__defaults__", (3 * size,))
    with serving(llm) as address, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(address)) for _ in range(6)]
        for one in slow:
            one.sendall(f"{HEAD}Content-Length: {size + 1}\r\n\r\n".encode() + b" " * size)
        for one in slow[:2]:
            answer = one.recv(1 << 16)
            assert b"503" in answer
            assert b"retry-after: 1" in answer.lower()
        # A short request has its own room, and a long one that comes at once displaces a slow one.
        assert ask(address)
        assert ask(address, extra_body={"metadata": {"x": "y" * size}})


def test_a_body_has_a_limit_of_time(llm: LLM, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BODY_S", 0.2)
    with serving(llm) as address, connect(address) as one:
        one.sendall(f"{HEAD}Content-Length: 99\r\n\r\n{{".encode())
        assert b"408" in one.recv(1 << 16)
        assert ask(address)


Held = tuple[threading.Event, threading.Semaphore, list[bytes]]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Readers that stop at bodies with "hold" until an event; a semaphore counts these bodies."""
    from heterollm.serve import app

    gate, came, read = threading.Event(), threading.Semaphore(0), []
    real, reply = app.ANSWERS["/v1/completions"]

    def slow(llm: LLM, defaults: Any, content: bytes) -> Any:
        read.append(content)
        if b"hold" in content:
            came.release()
            assert gate.wait(HANG_S)
        return real(llm, defaults, content)

    monkeypatch.setitem(app.ANSWERS, "/v1/completions", (slow, reply))
    yield gate, came, read
    gate.set()


def test_waiting_for_a_reader_counts_and_has_a_limit(llm: LLM, serving: Serving, held: Held) -> None:
    gate, came, _ = held
    long: Any = {"extra_body": {"metadata": {"hold": "x" * 100_000}}}
    with serving(llm, queue=3) as address, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, address, **long) for _ in range(2)]
        assert came.acquire(timeout=HANG_S)
        while b'"waiting":2' not in health(address):
            time.sleep(0.01)
        # A short one has a reader of its own.
        assert ask(address)
        asked.append(pool.submit(ask, address, **long))
        while b'"waiting":3' not in health(address):
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match="3 requests wait to be read") as caught:
            ask(address)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        gate.set()
        assert all(one.result(HANG_S) for one in asked)


def test_a_client_that_leaves_frees_its_place_among_the_readers(
    llm: LLM, serving: Serving, held: Held
) -> None:
    gate, came, read = held

    def body(mark: str) -> bytes:
        content = {"model": "tiny", "prompt": "x", "metadata": {mark: "x" * 100_000}}
        data = json.dumps(content).encode()
        return f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data

    with serving(llm, queue=2) as address:
        with connect(address) as begun, connect(address) as waits:
            begun.sendall(body("hold, begun"))
            assert came.acquire(timeout=HANG_S)
            waits.sendall(body("hold, waits"))
            while b'"waiting":2' not in health(address):
                time.sleep(0.01)
        while b'"waiting":0' not in health(address):
            time.sleep(0.01)
        gate.set()
        assert ask(address, extra_body={"metadata": {"last": "x" * 100_000}})
        assert not any(b"hold, waits" in content for content in read)


def test_a_prompt_beyond_the_context_is_refused_before_it_is_tokenised(
    llm: LLM, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    backend = llm.tokenizer._backend

    class Watched:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            seen.extend(map(len, texts))
            return backend.encode_batch_fast(texts, **options)

    monkeypatch.setattr(llm.tokenizer, "_backend", Watched())
    for size in (2_000_000, 7_000_000):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="a" * size)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "ab " * (size // 3)}]
            )
        assert caught.value.code == "context_length_exceeded"
    assert not seen


def test_other_threads_run_while_a_text_is_tokenised(llm: LLM) -> None:
    text, ended, counts = "def f(x):\n    return x\n" * 40_000, threading.Event(), [0]

    def count() -> None:
        while not ended.is_set():
            counts[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    while not counts[0]:
        time.sleep(0)
    before = counts[0]
    ids = llm.tokenizer.encode(text)
    during = counts[0] - before
    ended.set()
    counter.join()
    assert len(ids) > 100_000
    assert during > 100


VALUES = {
    "ids": b"[" + b"1," * 999 + b"1]",
    "lists": b"[" * 999,
    "objects": b'{"a":' * 999,
    "strings": b"[" + b'"a",' * 999 + b"1]",
    "behind text": rb'["a\"[[[\\", ' + b"1," * 999,
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_counted_before_they_are_decoded(name: str) -> None:
    with pytest.raises(RequestError, match="more than 900 values"):
        check_values(VALUES[name], 900)
    check_values(VALUES[name], 1100)


def test_text_holds_no_values() -> None:
    text = 'a "quoted" [list], {set} \\ \\" ' * 1000
    check_values(json.dumps({"prompt": text, "stop": [text]}).encode(), 10)
    for broken in (b'{"a', b'"\\', b'\\"', b""):
        check_values(broken, 10)
