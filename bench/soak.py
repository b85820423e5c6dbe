"""Does a server survive thousands of requests and attacks, and do they ever change an answer?

A child serves a model. Clients send completions at random: whole and streamed, of each service tier, some
with long prompts. Some read slowly, some leave before or during the answer, some send bodies that are no
requests. Others attack: schemas and grammars that are large, deep or chained, prompts of megabytes, options
beyond all bounds, sockets that stay silent or stop in the middle of a request (`soak_attacks.py`). The health
is asked for all the time. Each completion has a seed or temperature 0, and must have the text that the server
gave before the load, alone. With ``--kill-npu`` the NPU part fails in the middle of the run; from then on
they must be the texts of the GPU alone. The row has requests by kind, wrong answers, unhealthy states, and
memory and sessions before and after.
Exit code 1 if an answer is wrong, a request is neither answered nor refused, the server was unhealthy, or its
memory grew.

    python bench/soak.py tiny-python-lm --requests 3000
    python bench/soak.py tiny-python-lm --requests 3000 --plan plan.json --kill-npu --out soak.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from conditions import append_rows, conditions, script_parser
from soak_attacks import ATTACKS, BROKEN, REFUSALS, Sockets
from soak_doors import Doors

TEXT: Final = "def scale(values, factor):\n    return [value * factor for value in values]\n\n"
TIERS: Final = ("default", "default", "flex", "priority")
KINDS: Final = {
    "answer": 45,
    "door": 15,
    "slow reader": 5,
    "leaves early": 8,
    "leaves late": 8,
    "malformed": 10,
    "bad option": 5,
    "socket": 2,
    "long prompt": 1,
    "schema": 1,
}
"""Kinds of requests, and their weights."""

KILL_NPU: Final = signal.SIGRTMIN
"""LLVM, which PoCL loads, takes SIGUSR1 and SIGUSR2 for itself."""

JSON: Final = {"Content-Type": "application/json"}
PARTS: Final = 8
"""Parts of a run, with the memory after each."""

TIMEOUT_S: Final = 300
HEALTH_S: Final = 0.25
"""Time between two looks at the health."""

REST_S: Final = 3
"""Time after which a server at rest has returned freed memory to the system."""

MOST_GROWTH_MIB: Final = 64
"""Growth of the memory that is no leak: kernels and sessions of lengths that are new in the second half."""


def cases(count: int) -> list[dict[str, Any]]:
    """Return the bodies of completions, with prompts of a few tokens up to several chunks."""
    chosen = random.Random(3)  # noqa: S311 - no secrets
    return [
        {
            "model": "soak",
            "prompt": TEXT * chosen.choice((0, 0, 1, 2, 8, 20)) + f"def name_{number}(",
            "max_tokens": chosen.choice((4, 16, 48)),
            **({"temperature": 0} if number % 3 == 0 else {"seed": number, "top_p": 0.9}),
        }
        for number in range(count)
    ]


class Served:
    """A server in a child process."""

    def __init__(self, model: str, options: Sequence[str]) -> None:
        command = [sys.executable, __file__, "--serve", model, "--port", "0", "--name", "soak", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603 - this file
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", said):
                self.port = int(found[1])
                break
        else:
            raise SystemExit(said)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def connect(self) -> contextlib.closing[http.client.HTTPConnection]:
        """Return a new connection."""
        return contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S))

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON at a path."""
        with self.connect() as connection:
            connection.request("GET", path)
            found: dict[str, Any] = json.loads(connection.getresponse().read())
            return found

    def complete(self, body: dict[str, Any], rest_s: float = 0.0) -> tuple[int, str]:
        """Return status and text of a completion; a slow reader rests between reads of a stream."""
        with self.connect() as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), JSON)
            answer = connection.getresponse()
            if answer.status != 200 or not body.get("stream"):
                found = json.loads(answer.read())
                return answer.status, found["choices"][0]["text"] if answer.status == 200 else str(found)
            content = b""
            while part := answer.read(2048 if rest_s else 1 << 16):
                content += part
                time.sleep(rest_s)
        lines = [line[6:] for line in content.decode().split("\n\n") if line.startswith("data: ")]
        if lines[-1] != "[DONE]":
            return 500, lines[-1]
        chunks = [json.loads(line) for line in lines[:-1]]
        return 200, "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    def post(self, path: str, content: bytes) -> tuple[int, str]:
        """Return status and body of an answer; 408 if the server has ended the connection."""
        try:
            with self.connect() as connection:
                connection.request("POST", path, content, JSON)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
        except (ConnectionError, http.client.HTTPException) as error:
            return 408, json.dumps({"error": {"message": repr(error)}})

    def counts(self) -> dict[str, Any]:
        """Return memory, sessions and threads, once the server is at rest."""
        ends = time.monotonic() + TIMEOUT_S
        while (state := self.get("/health"))["running"] or state["waiting"]:
            if time.monotonic() > ends:
                raise SystemExit(f"Jobs do not end: {state}")
            time.sleep(0.1)
        time.sleep(REST_S)
        process = psutil.Process(self.process.pid)
        return {
            "uss_mib": round(process.memory_full_info().uss / 2**20, 1),
            "sessions": self.get("/status")["sessions"],
            "threads": process.num_threads(),
            "open_files": process.num_fds(),
        }


class Soak:
    """Clients on threads, each with random requests.

    Args:
        server: The server.
        bodies: The completions.
        texts: Their texts without load.
        doors: Other doors, which know their answers.
        seed: Of the choice of requests.
        left_out: Kinds of requests to leave out.
    """

    def __init__(
        self,
        server: Served,
        bodies: Sequence[dict[str, Any]],
        texts: Sequence[str],
        doors: Doors,
        seed: int,
        left_out: Sequence[str],
    ) -> None:
        self.weights = {kind: weight for kind, weight in KINDS.items() if kind not in left_out}
        self.sockets = Sockets(server.port)
        self.unhealthy: list[str] = []
        self.server, self.bodies, self.texts, self.doors = server, bodies, list(texts), doors
        self.random = random.Random(seed)  # noqa: S311 - no secrets
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: dict[str, list[float]] = {tier: [] for tier in TIERS}
        self._lock = threading.Lock()
        self._left = 0

    def run(self, requests: int, clients: int) -> None:
        """Send requests and wait for all answers."""
        self._left = requests
        threads = [threading.Thread(target=self._client) for _ in range(clients)]
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(ended,))
        for thread in (*threads, watch):
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()
        watch.join()
        self.sockets.close()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(HEALTH_S):
            try:
                state = self.server.get("/health")
            except Exception as error:  # noqa: BLE001 - a fault of the server
                state = {"status": repr(error)}
            if state["status"] != "ok":
                self.unhealthy.append(str(state))

    def _client(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                self._left -= 1
                kind = self.random.choices(list(self.weights), list(self.weights.values()))[0]
                case = self.random.randrange(len(self.bodies))
                tier = self.random.choice(TIERS)
                stream = kind == "slow reader" or self.random.random() < 0.5
                moment = self.random.random()
            try:
                self._one(kind, case, tier, stream, moment)
            except Exception as error:  # noqa: BLE001 - a fault of the server
                with self._lock:
                    self.wrong.append(f"{kind}: {error!r}")

    def _one(self, kind: str, case: int, tier: str, stream: bool, moment: float) -> None:
        body = {**self.bodies[case], "stream": stream, "service_tier": tier}
        if kind == "malformed":
            with self.server.connect() as connection:
                connection.request("POST", "/v1/completions", BROKEN[case % len(BROKEN)], JSON)
                answer = connection.getresponse()
                found = json.loads(answer.read())
            self._count(kind, 400 <= answer.status < 500 and bool(found["error"]["message"]), str(found))
        elif kind == "door":
            self._count(kind, *self.doors.check(case, stream, moment))
        elif kind in ATTACKS:
            attack = ATTACKS[kind][int(moment * len(ATTACKS[kind]))]
            status, text = self.server.post(*attack())
            right = status == 200 or (status in REFUSALS and bool(json.loads(text)["error"]["message"]))
            self._count(kind, right, f"{status} {text:.300}")
        elif kind == "socket":
            with self._lock:
                self.sockets.add(self.random)
            self._count(kind, True, "")
        elif kind.startswith("leaves"):
            with self.server.connect() as connection:
                content = json.dumps({**body, "max_tokens": 400, "ignore_eos": True, "stream": True})
                connection.request("POST", "/v1/completions", content, JSON)
                if kind == "leaves late":
                    connection.getresponse().read(200)
                else:
                    time.sleep(0.05 * moment)
            self._count(kind, True, "")
        else:
            begin_s = time.monotonic()
            status, text = self.server.complete(body, 0.2 if kind == "slow reader" else 0.0)
            if status == 503:
                self._count("busy", True, "")
                return
            if kind == "answer":
                self.seconds[tier].append(time.monotonic() - begin_s)
            self._count(
                kind, status == 200 and text == self.texts[case], f"{status} {text!r} {self.texts[case]!r}"
            )

    def _count(self, kind: str, right: bool, what: str) -> None:
        with self._lock:
            self.kinds[kind] += 1
            if not right:
                self.wrong.append(f"{kind}: {what}")


def alone(server: Served, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """Return the texts of completions, one after the other."""
    found = [server.complete(body) for body in bodies]
    assert all(status == 200 for status, _ in found), found
    return [text for _, text in found]


def serve(words: Sequence[str]) -> int:
    """Serve as the command does; from a signal on, the graphs of the NPU fail."""
    from heterollm.base import GraphError
    from heterollm.cli import main
    from heterollm.kernels.npu.session import SessionGraph

    killed, bind = threading.Event(), SessionGraph.bind
    signal.signal(KILL_NPU, lambda *_: killed.set())

    def bind_to_fail(graph: SessionGraph, *buffers: Any) -> Callable[[], None]:  # noqa: ANN401 - as bind
        call = bind(graph, *buffers)

        def run() -> None:
            if killed.is_set():
                raise GraphError("The NPU was killed.")
            call()

        return run

    SessionGraph.bind = bind_to_fail  # type: ignore[method-assign]
    return main(["serve", *words])


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one run."""
    words = ["--device", "host", "--plan", options.plan, "--queue", str(options.queue)]
    words += ["--allow-fallback"] if options.kill_npu else []
    server = Served(options.model, words)
    bodies = cases(options.cases)
    try:
        plain = {"stream": False}
        texts = alone(server, [body | plain for body in bodies])
        doors = Doors(server.post, [body["prompt"] for body in bodies])
        warm = Soak(server, bodies, texts, doors, 1, options.without)
        warm.run(options.requests // 10, options.clients)
        before = server.counts()
        begin_s = time.monotonic()
        run = Soak(server, bodies, texts, doors, 2, options.without)
        run.wrong += warm.wrong
        run.unhealthy += warm.unhealthy
        course = [before["uss_mib"]]
        for part in range(PARTS):
            if options.kill_npu and part == PARTS // 2:
                server.process.send_signal(KILL_NPU)
                run.texts = alone(server, [body | plain for body in bodies])
                doors.learn()
                assert server.get("/status")["failures"], "the NPU did not fail"
            run.run(options.requests // PARTS, options.clients)
            course.append(server.counts()["uss_mib"])
        took_s = time.monotonic() - begin_s
        after = server.counts()
        changed = sum(one != other for one, other in zip(texts, run.texts, strict=True))
    finally:
        server.process.terminate()
        code = server.process.wait(60)
    for problem in (*run.wrong[:10], *run.unhealthy[:10]):
        print(problem, file=sys.stderr)
    return {
        **conditions(),
        "model": Path(options.model).name,
        "plan": Path(options.plan).name,
        "requests": sum(run.kinds.values()),
        "clients": options.clients,
        "kinds": dict(run.kinds),
        "wrong": len(run.wrong),
        "unhealthy": len(run.unhealthy),
        "npu_killed": options.kill_npu,
        "texts_changed_by_the_failure": changed,
        "seconds": round(took_s, 1),
        "before": before,
        "after": after,
        "uss_mib": course,
        "median_s": {tier: round(statistics.median(own), 3) for tier, own in run.seconds.items() if own},
        "exit_code": code,
    }


def main() -> int:
    """Run the bench."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2:])
    parser = script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--cases", type=int, default=24, help="different completions")
    parser.add_argument("--queue", type=int, default=64)
    parser.add_argument("--plan", default="gpu")
    parser.add_argument("--kill-npu", action="store_true")
    parser.add_argument("--without", action="append", default=[], choices=KINDS, help="leave out a kind")
    options = parser.parse_args()
    row = soak(options)
    print(json.dumps(row, indent=1))
    append_rows(options.out, row)
    growth = row["uss_mib"][-1] - row["uss_mib"][len(row["uss_mib"]) // 2]
    sound = not (row["wrong"] or row["unhealthy"] or row["exit_code"]) and growth < MOST_GROWTH_MIB
    print(
        f"{'SOUND' if sound else 'UNSOUND'}: {row['requests']} requests, {row['wrong']} wrong,"
        f" {row['unhealthy']} unhealthy, {growth:+.1f} MiB in the second half, exit code {row['exit_code']}"
    )
    return int(not sound)


if __name__ == "__main__":
    sys.exit(main())
