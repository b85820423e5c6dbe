"""Does a server survive thousands of requests and attacks, and do they ever change an answer?

A child serves a model, and lets answers share passes also where these would be faster alone. Clients send
requests at random to every door, whole and streamed, of each service tier (`soak_doors.py`): several answers
and prompts, seeds, log-probabilities, schemas, grammars, tools, embeddings, short and long prompts. Some read
slowly, some leave before or during the answer, some send bodies that are no requests. Others attack: schemas
and grammars that are large, deep or chained, prompts of megabytes, options beyond all bounds, sockets that
stay silent or stop in the middle of a request (`soak_attacks.py`). The health is asked for all the time. Each
request has a seed or temperature 0, and must have the answer that the server gave before the load, alone.
With ``--kill-npu`` the NPU part fails in the middle of the run; from then on the answers must be those of the
GPU alone. The row has requests by kind and door, wrong answers, unhealthy states, rows of a pass, and memory
and sessions before and after.
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
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from conditions import append_rows, conditions, script_parser
from soak_attacks import ATTACKS, BROKEN, REFUSALS, Sockets
from soak_doors import Asked, answer_of, requests

TIERS: Final = ("default", "default", "flex", "priority")
KINDS: Final = {
    "answer": 60,
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

BUSY: Final = (503, 529)
RESTS: Final = 10
"""Pauses of a slow reader."""

TIMEOUT_S: Final = 300
HEALTH_S: Final = 0.25
"""Time between two looks at the health."""

REST_S: Final = 3
"""Time after which a server at rest has returned freed memory to the system."""

MOST_GROWTH_MIB: Final = 64
"""Growth of the least memory at rest that is no leak: kernels and sessions of new lengths. At rest the heap
keeps up to 140 MiB more at one moment than at another; a leak raises the least, too."""


class Served:
    """A server in a child process.

    Args:
        model: The model.
        options: Options of the command.
        shares: Whether answers share passes also where these would be faster alone.
    """

    def __init__(self, model: str, options: Sequence[str], *, shares: bool = False) -> None:
        mode = "--serve-shared" if shares else "--serve"
        command = [sys.executable, __file__, mode, model, "--port", "0", "--name", "soak", *options]
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

    def post(self, path: str, content: bytes, rest_s: float = 0.0) -> tuple[int, str]:
        """Return status and body of an answer; 408 if the server has ended the connection.

        A slow reader rests between reads of the body.
        """
        try:
            with self.connect() as connection:
                connection.request("POST", path, content, JSON)
                answer = connection.getresponse()
                body = b""
                for _ in range(RESTS if rest_s else 0):
                    body += answer.read(2048)
                    time.sleep(rest_s)
                return answer.status, (body + answer.read()).decode()
        except (ConnectionError, http.client.HTTPException) as error:
            return 408, json.dumps({"error": {"message": repr(error)}})

    def ask(self, asked: Asked) -> list[Any]:
        """Return the answer to a request, which is the only one."""
        status, content = self.post(asked.path, asked.whole())
        assert status == 200, (status, asked, content)
        return answer_of(content, stream=False)

    def metric(self, name: str) -> float:
        """Return a number of the metrics."""
        with self.connect() as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def rows_of_a_pass(self) -> float:
        """Return the mean number of answers that shared a decode pass."""
        return round(self.metric("heterollm_decode_rows") / self.metric("heterollm_decode_passes"), 2)

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
        asked: The requests.
        answers: Their answers without load.
        seed: Of the choice of requests.
        left_out: Kinds of requests to leave out.
    """

    def __init__(
        self,
        server: Served,
        asked: Sequence[Asked],
        answers: Sequence[list[Any]],
        seed: int,
        left_out: Sequence[str],
    ) -> None:
        self.weights = {kind: weight for kind, weight in KINDS.items() if kind not in left_out}
        self.sockets = Sockets(server.port)
        self.unhealthy: list[str] = []
        self.server, self.asked, self.answers = server, asked, answers
        self.random = random.Random(seed)  # noqa: S311 - no secrets
        self.kinds: Counter[str] = Counter()
        self.doors: Counter[str] = Counter()
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
                case = self.random.randrange(len(self.asked))
                tier = self.random.choice(TIERS)
                stream = kind == "slow reader" or self.random.random() < 0.5
                moment = self.random.random()
            try:
                self._one(kind, case, tier, stream, moment)
            except Exception as error:  # noqa: BLE001 - a fault of the server
                with self._lock:
                    self.wrong.append(f"{kind}: {error!r}")

    def _one(self, kind: str, case: int, tier: str, stream: bool, moment: float) -> None:
        asked = self.asked[case]
        if kind == "malformed":
            with self.server.connect() as connection:
                connection.request("POST", "/v1/completions", BROKEN[case % len(BROKEN)], JSON)
                answer = connection.getresponse()
                found = json.loads(answer.read())
            self._count(kind, 400 <= answer.status < 500 and bool(found["error"]["message"]), str(found))
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
                connection.request("POST", asked.path, asked.long(), JSON)
                if kind == "leaves late":
                    connection.getresponse().read(200)
                else:
                    time.sleep(0.05 * moment)
            self._count(kind, True, "")
        else:
            begin_s = time.monotonic()
            stream = stream and asked.streams
            status, content = self.server.post(
                asked.path, asked.whole(tier, stream=stream), 0.2 if kind == "slow reader" else 0.0
            )
            if status in BUSY:
                self._count("busy", True, "")
                return
            if kind == "answer":
                self.seconds[tier].append(time.monotonic() - begin_s)
            found = answer_of(content, stream=stream) if status == 200 else content
            expected = self.answers[case]
            self.doors[asked.path + (", streamed" if stream else "")] += 1
            self._count(kind, found == expected, f"{status} stream {stream} {asked} {found} {expected}")

    def _count(self, kind: str, right: bool, what: str) -> None:
        with self._lock:
            self.kinds[kind] += 1
            if not right:
                self.wrong.append(f"{kind}: {what}")


@contextlib.contextmanager
def with_pooling(model: str) -> Iterator[str]:
    """Give a copy of a model that declares the pooling of embeddings, as a model without one does not."""
    from heterollm.model import Checkpoint

    source = Checkpoint(model).folder
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / Path(model).name
        shutil.copytree(source, folder)
        if not (folder / "modules.json").exists():
            kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
            modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
            (folder / "modules.json").write_text(json.dumps(modules))
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        yield str(folder)


def serve(words: Sequence[str], *, shares: bool) -> int:
    """Serve as the command does; from a signal on, the graphs of the NPU fail.

    Args:
        words: The options of the command.
        shares: Whether answers share passes also where these would be faster alone.
    """
    from heterollm.base import GraphError
    from heterollm.cli import main
    from heterollm.engine.pass_times import PassTimes
    from heterollm.kernels.npu.session import SessionGraph

    if shares:
        PassTimes.pays = lambda *_: True  # type: ignore[method-assign]

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


def soak(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one run."""
    words = ["--device", "host", "--plan", options.plan, "--queue", str(options.queue)]
    words += ["--sessions-gib", str(options.sessions_gib)] if options.sessions_gib else []
    words += ["--allow-fallback"] if options.kill_npu else []
    server = Served(model, words, shares=True)
    asked = requests(options.cases)
    try:
        first = answers = [server.ask(one) for one in asked]
        warm = Soak(server, asked, answers, 1, options.without)
        warm.run(options.requests // 10, options.clients)
        before = server.counts()
        begin_s = time.monotonic()
        run = Soak(server, asked, answers, 2, options.without)
        run.wrong += warm.wrong
        run.unhealthy += warm.unhealthy
        course = [before["uss_mib"]]
        for part in range(PARTS):
            if options.kill_npu and part == PARTS // 2:
                server.process.send_signal(KILL_NPU)
                run.answers = answers = [server.ask(one) for one in asked]
                assert server.get("/status")["failures"], "the NPU did not fail"
            run.run(options.requests // PARTS, options.clients)
            course.append(server.counts()["uss_mib"])
        took_s = time.monotonic() - begin_s
        after = server.counts()
        rows = server.rows_of_a_pass()
        again = [server.ask(one) for one in asked]
        pairs = zip(asked, again, answers, strict=True)
        run.wrong += [f"alone again: {one}" for one, found, own in pairs if found != own]
        changed = sum(one != other for one, other in zip(first, answers, strict=True))
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
        "answers_by_door": dict(sorted(run.doors.items())),
        "rows_of_a_pass": rows,
        "wrong": len(run.wrong),
        "unhealthy": len(run.unhealthy),
        "npu_killed": options.kill_npu,
        "answers_changed_by_the_failure": changed,
        "seconds": round(took_s, 1),
        "before": before,
        "after": after,
        "uss_mib": course,
        "median_s": {tier: round(statistics.median(own), 3) for tier, own in run.seconds.items() if own},
        "exit_code": code,
    }


def main() -> int:
    """Run the bench."""
    if sys.argv[1:2] in (["--serve"], ["--serve-shared"]):
        return serve(sys.argv[2:], shares=sys.argv[1] == "--serve-shared")
    parser = script_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--cases", type=int, default=87, help="different requests")
    parser.add_argument("--queue", type=int, default=64)
    parser.add_argument("--sessions-gib", type=float, help="little memory, for which requests wait")
    parser.add_argument("--plan", default="gpu")
    parser.add_argument("--kill-npu", action="store_true")
    parser.add_argument("--without", action="append", default=[], choices=KINDS, help="leave out a kind")
    options = parser.parse_args()
    with with_pooling(options.model) as folder:
        row = soak(folder, options)
    print(json.dumps(row, indent=1))
    append_rows(options.out, row)
    course = row["uss_mib"]
    growth = min(course[-PARTS // 4 :]) - min(course[PARTS // 4 : PARTS // 2 + 1])
    sound = not (row["wrong"] or row["unhealthy"] or row["exit_code"]) and growth < MOST_GROWTH_MIB
    print(
        f"{'SOUND' if sound else 'UNSOUND'}: {row['requests']} requests, {row['wrong']} wrong,"
        f" {row['unhealthy']} unhealthy, {growth:+.1f} MiB from the second to the last quarter, exit code"
        f" {row['exit_code']}"
    )
    return int(not sound)


if __name__ == "__main__":
    sys.exit(main())
