"""Models of a hub on this machine: fetched whole, interrupted, listed and deleted."""

import contextlib
import hashlib
import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gguf
import pytest
from gguf_writer import PLAIN, write_gguf

from heterollm.base import CheckpointError, HeteroLLMError
from heterollm.model import pull_model, stored_models
from heterollm.model.checkpoint import checkpoint_folder
from heterollm.model.hub import hub_folder
from heterollm.model.hub_files import needed_files, plain_files, quantisation

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """The calls of the hub's client that fetch a model."""

    daemon_threads = True

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories = repositories
        self.requests = []
        self.sends = None
        self.headers = {}
        self.listed = {}
        self.sha = COMMIT


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub = self.server
        info = re.fullmatch(r"/api/models/(\w+/[\w.-]+)(/revision/\w+)?(\?.*)?", self.path)
        tree = re.fullmatch(r"/api/models/(\w+/[\w-]+)/tree/.*", self.path)
        file = re.fullmatch(r"/(\w+/[\w-]+)/resolve/(main|\w{40})/([\w./-]+)", self.path)
        files = hub.repositories.get((info or tree or file or [None, None])[1])
        if files is None or (file and file[3] not in files):
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound" if files else "RepoNotFound"})
        elif tree:
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40, **hub.listed}
                for name, data in files.items()
            ]
            self.answer(200, json.dumps(listed).encode())
        elif info:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            found = {"id": info[1], "sha": hub.sha, "siblings": siblings, "tags": []}
            self.answer(200, json.dumps(found).encode())
        else:
            data = files[file[3]]
            place = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            start = int(place[1]) if place else 0
            hub.requests.append((self.command, file[3], start))
            more = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, **hub.headers}
            if place:
                more["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.answer(206 if place else 200, (hub.sends or data)[start:], more)

    do_HEAD = do_GET

    def answer(self, status, data, more=()):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in dict(more).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # the client was interrupted
                self.wfile.write(data)

    def log_message(self, *_arguments): ...


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = Hub({})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    server.point_to = lambda url: point_to(monkeypatch, url, tmp_path / "hub")
    server.point_to(f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def point_to(monkeypatch, url, cache):
    """Make the hub's client ask a server, and keep files in a folder."""
    for module in ("constants", "hf_api", "file_download", "_snapshot_download"):
        for name, value in (
            ("ENDPOINT", url),
            ("HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HUB_CACHE", str(cache)),
        ):
            monkeypatch.setattr(f"huggingface_hub.{module}.{name}", value, raising=False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)


def fetched(name, gguf=None):
    seen = []
    path = pull_model(name, gguf, lambda _stage, done, total: seen.append((done, total)))
    return path, seen


def test_only_the_files_of_a_load_are_fetched(hub, run):
    files = {name: name.encode() * 100 for name in ("config.json", "tokenizer.json", "model.safetensors")}
    unused = dict.fromkeys(("pytorch_model.bin", "original/a.safetensors", "x.pth", "README.md"), b"no")
    hub.repositories["me/tiny"] = files | unused
    path, seen = fetched("me/tiny")
    assert {own.name: own.read_bytes() for own in path.iterdir()} == files
    assert seen[0][0] == 0
    assert seen[-1] == (sum(map(len, files.values())),) * 2
    assert sorted(seen) == seen
    hub.requests.clear()
    assert fetched("me/tiny")[0] == path
    assert not [one for one in hub.requests if one[0] == "GET"]
    [model] = stored_models()
    assert (model.name, model.kind, model.paths) == ("me/tiny", "fetched", (path,))
    assert "me/tiny" in run("list")[1]
    [listed] = json.loads(run("list", "--json")[1])
    assert set(listed) == {"name", "kind", "size_bytes", "paths"}
    assert run("rm", "me/other", "--yes")[0] == 1
    assert run("rm", "me/tiny", "--yes")[0] == 0
    assert not stored_models()
    assert not path.exists()


def test_an_interrupted_fetch_goes_on_where_it_was(hub, tmp_path):
    data = bytes(range(256)) * 200_000
    hub.repositories["me/big"] = {"config.json": b"{}", "a.Q8_0.gguf": data, "a.Q4_0.gguf": b"GGUF"}

    def stop(_stage, done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_model("me/big", "*Q8_0*", stop)
    [part] = (tmp_path / "hub").rglob("*.part")
    assert 0 < part.stat().st_size < len(data)
    hub.requests.clear()
    path, _ = fetched("me/big", "*Q8_0*")
    assert path.read_bytes() == data
    [start] = [start for kind, _, start in hub.requests if kind == "GET"]
    assert 0 < start < len(data)
    assert stored_models()[0].paths == (path,)
    assert not list((tmp_path / "hub").rglob("*.part"))


def test_content_that_is_not_the_stated_one_is_refused(hub, tmp_path):
    data = bytes(17 << 20)
    hub.repositories["me/bad"] = {"a.gguf": data}
    hub.sends = data[:-1] + b"x"
    with pytest.raises(CheckpointError, match="other content than the hub states"):
        fetched("me/bad")
    assert not stored_models()
    hub.sends = None
    assert fetched("me/bad")[0].read_bytes() == data


@pytest.mark.parametrize(
    ("files", "gguf", "said"),
    [
        (["pytorch_model.bin", "config.json"], None, "neither safetensors nor GGUF"),
        (["a.Q4_0.gguf", "a.Q8_0.gguf"], None, "has 2 GGUF files: a.Q4_0.gguf, a.Q8_0.gguf"),
        (["a.Q4_0.gguf", "a.Q8_0.gguf"], "*Q6_K*", r"has no GGUF files like '\*Q6_K\*'; it has Q4_0, Q8_0"),
        (["model.safetensors"], "*Q6_K*", "has no GGUF files"),
    ],
)
def test_an_unclear_choice_is_refused(files, gguf, said):
    with pytest.raises(HeteroLLMError, match=said):
        needed_files("me/model", files, gguf)


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.IQ4_XS.gguf", "IQ4_XS"),
        ("m-UD-Q4_K_XL-00001-of-00003.gguf", "UD-Q4_K_XL"),
        ("BF16/m-BF16-00001-of-00002.gguf", "BF16"),
        ("Q8_0/model.gguf", "Q8_0"),
        ("qwen2-0_5b-instruct-q4_0.gguf", "q4_0"),
        ("m-fp16.gguf", "fp16"),
        ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
        ("Q4model.gguf", ""),
    ],
)
def test_names_of_files_state_their_quantisation(file, quant):
    assert quantisation(file) == quant


MANY = [
    *("mmproj-F16.gguf", "m-BF16.gguf", "m-F16.gguf", "m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf"),
    *("m-UD-Q4_K_XL.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"),
    *("a/m-Q6_K.gguf", "b/m-Q6_K.gguf"),
]


@pytest.mark.parametrize(
    ("quant", "found"),
    [
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("F16", ["m-F16.gguf"]),  # not BF16, and nothing for pictures
        ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("Q8_0", ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"]),
        (None, ["m-Q4_K_M.gguf"]),
    ],
)
def test_a_quantisation_means_one_file(quant, found):
    assert needed_files("me/m", MANY, None, quant) == found


def test_a_quantisation_that_is_not_there_or_twice_there_is_refused():
    with pytest.raises(
        HeteroLLMError, match="no GGUF files of quantisation Q4_K; it has BF16, F16, IQ4_XS, Q4_K_M"
    ) as no:
        needed_files("me/m", MANY, None, "Q4_K")
    assert "me/m:BF16" in no.value.fix
    with pytest.raises(
        HeteroLLMError, match=r"2 GGUF files of quantisation Q6_K: a/m-Q6_K.gguf, b/m-Q6_K.gguf"
    ) as two:
        needed_files("me/m", MANY, None, "Q6_K")
    assert "https://huggingface.co/me/m/blob/main/a/m-Q6_K.gguf" in two.value.fix
    with pytest.raises(CheckpointError, match="me/m has no GGUF files"):
        needed_files("me/m", ["model.safetensors", "mmproj-F16.gguf"], None, "F16")


@pytest.fixture
def tiny_gguf(checkpoint, tmp_path):
    kind = gguf.GGMLQuantizationType.F32
    return write_gguf(checkpoint("qwen2", **PLAIN), tmp_path / "tiny.gguf", kind, kind).read_bytes()


@pytest.mark.parametrize("command", ["generate", "plan", "chat"])
def test_commands_fetch_a_quantisation_once_and_keep_it_without_a_network(
    hub, run, tiny_gguf, monkeypatch, command
):
    hub.repositories["me/tiny-GGUF"] = {"README.md": b"", "t-F16.gguf": tiny_gguf, "t-Q8_0.gguf": b"GGUF"}
    words = {"generate": ["import os"], "plan": [], "chat": []}[command]
    few = [] if command == "plan" else ["--max-new-tokens", "2", "--plan", "gpu"]
    device = ["--device", "sim:snapdragon-8gen3" if command == "plan" else "host"]
    if command == "plan":
        assert run("profile", "tiny-python-lm", *device, "--precision", "w4a16")[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    line = (command, "me/tiny-GGUF:f16", *words, *device, *few)
    code, out, err = run(*line)
    assert (code, bool(out)) == (0, True), err
    assert {file for kind, file, _ in hub.requests if kind == "GET"} == {"t-F16.gguf"}
    hub.point_to("http://127.0.0.1:9")  # where nobody answers; the cache has the file
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    assert run(*line)[:2] == (0, out)
    code, _, err = run(command, "me/tiny-GGUF:Q8_0", *words, *device, *few)
    assert code == 1
    assert "cannot be reached" in err
    assert run("pull", "me/tiny-GGUF:F16")[0] == 1


def test_known_names_are_fetched_and_planned(hub, run, bundled_model):
    files = {path.name: path.read_bytes() for path in bundled_model.iterdir() if path.is_file()}
    hub.repositories["Qwen/Qwen3-0"] = {}
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    hub.repositories[name] = files
    few = ("--device", "host", "--plan", "gpu", "--max-new-tokens", "2")
    code, out, err = run("generate", "smollm2-135m", "import os", *few)
    assert (code, bool(out)) == (0, True), err
    assert stored_models()[0].name == name
    assert run("pull", "SmolLM2-135M")[0] == 0


def test_a_fetch_at_load_reports_its_bytes(hub, bundled_model):
    files = {path.name: path.read_bytes() for path in bundled_model.iterdir() if path.is_file()}
    hub.repositories["me/tiny"] = files
    seen = []
    checkpoint_folder("me/tiny", progress=lambda *step: seen.append(step))
    assert {stage for stage, _, _ in seen} == {"Fetching me/tiny"}
    assert seen[-1][1] == seen[-1][2] > len(files["model.safetensors"])


def test_a_model_that_is_not_there_is_refused(hub):
    with pytest.raises(CheckpointError, match="no public model of this name"):
        fetched("me/nothing")
    with pytest.raises(HeteroLLMError, match="no name of a model"):
        fetched("../etc")


OUTSIDE = ["/tmp/x", "../../../outside/x", "a/b", "..", "nul", "a\\b", "c:x"]


@pytest.mark.parametrize("header", ["ETag", "X-Linked-ETag", "X-Repo-Commit"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_hub_names_no_files_outside_of_its_cache(hub, tmp_path, header, name):
    for size in (10, 17 << 20):  # fetched by the client, and by heterollm
        hub.repositories["me/evil"] = {"config.json": b"{}", "model.safetensors": bytes(size)}
        hub.headers = {header: f'"{name}"' if header == "ETag" else name}
        with pytest.raises(CheckpointError, match=r"which is no name"):
            fetched("me/evil")
        with pytest.raises(CheckpointError, match=r"which is no name"):
            hub_folder("me/evil")
    made = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert all(path.is_relative_to(tmp_path / "hub") and "blobs" not in path.parts for path in made)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_listing_names_no_files_outside_of_the_cache(hub, tmp_path, name):
    hub.repositories["me/evil"] = {"config.json": b"{}", "model.safetensors": b"x"}
    lfs = {"oid": name, "size": 1, "pointerSize": 1}
    for listed in ({"oid": name}, {"lfs": lfs}, {"xetHash": name}):
        hub.listed = listed
        with pytest.raises(CheckpointError, match=r"which is no name"):
            hub_folder("me/evil")


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_hub_names_no_commit_outside_of_its_cache(hub, tmp_path, name):
    hub.repositories["me/evil"] = {"config.json": b"{}", "model.safetensors": b"x"}
    hub.sha = name
    for fetch in (fetched, hub_folder):
        with pytest.raises(CheckpointError, match=r"which is no name"):
            fetch("me/evil")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_files_of_other_names_are_not_fetched():
    names = ("config.json", "../x.safetensors", "a/../../y.gguf", "nul.json", "model.safetensors")
    assert plain_files(dict.fromkeys(names, 1)) == {"config.json": 1, "model.safetensors": 1}


def test_rm_keeps_files_that_are_not_the_hubs(hub, tmp_path, run):
    hub.repositories["me/tiny"] = {"config.json": b"{}", "model.safetensors": b"x" * 100}
    fetched("me/tiny")
    folder = tmp_path / "hub" / "models--me--tiny"
    notes = folder / "notes.txt"
    notes.write_text("mine")
    code, _, err = run("rm", "me/tiny", "--yes")
    assert (code, notes.read_text()) == (1, "mine")
    assert "'notes.txt', which is not the hub's" in err
    notes.unlink()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert run("rm", "me/tiny", "--yes")[0] == 1
    assert (tmp_path / "elsewhere" / "snapshots").is_dir()
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    assert run("rm", "me/tiny", "--yes")[0] == 0
    assert not folder.exists()


def test_rm_takes_the_named_one_of_two_copies(hub, tmp_path, run):
    for name in ("me/tiny", "me/copy"):
        hub.repositories[name] = {"config.json": b"{}", "model.safetensors": b"x" * 100}
        fetched(name)
    assert run("rm", "me/copy", "--yes")[0] == 0
    assert [model.name for model in stored_models()] == ["me/tiny"]
