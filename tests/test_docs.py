"""The documents: links resolve, commands parse, the quick ones and the snippets run, schemas hold.

Commands and snippets of README and docs/ name a checkpoint as ``path/or/hub-name``, ``path/to/checkpoint``,
``MODEL``, ``CHECKPOINT`` or ``FOLDER``; here each stands for the bundled model. And a command runs here with
the first of its models and prompts, which is not long, and as it is with the slow tests. Those are the only
changes.
Snippets marked ``python`` run; one that needs what the tests have not is marked ``py`` and does not.
"""

import ast
import copy
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import jsonschema
import msgspec
import pytest
import typer
import yaml

from heterollm.base import CalibrationError, OptionError, PlanError, ProfileError, TraceError
from heterollm.calibration import Calibration
from heterollm.calibration.range_records import FfnCalibration, LinearCalibration, RangeErrors
from heterollm.cli import main
from heterollm.cli.command_line import app
from heterollm.kernels.sim.soc.parameters import parse_soc
from heterollm.model.known_names import known_repository
from heterollm.profiler.records import Profile
from heterollm.simulate import SimulationRequest, simulate
from heterollm.solver import Plan
from heterollm.trace.file import trace_from_json, trace_lines

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "heterollm" / "data" / "tiny_python_lm"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
TROUBLESHOOTING = "docs/troubleshooting.md"
CHECKPOINTS = ("path/or/hub-name", "path/to/checkpoint", "MODEL", "CHECKPOINT", "FOLDER")
SIMULATED = "sim:snapdragon-8gen3"

PARSED_ONLY = {
    "bench": "takes minutes",
    "chat": "needs a person",
    "convert": "takes 15 seconds; tests/heterollm/model/test_convert.py runs it",
    "eval": "takes 20 seconds; tests/heterollm/benchmarks/test_evaluate.py runs it",
    "pull": "needs the hub; tests/heterollm/model/test_hub.py runs it with one of its own",
    "compile": "compiles for minutes; tests/heterollm/planning/test_ahead.py runs it",
    "demo": "takes a minute; .ci/run runs it",
    "doctor": "takes 20 seconds a device; tests/heterollm/doctor/test_doctor.py runs it",
    "serve": "runs until a signal; tests/heterollm/serve has servers",
    "trace": "reads a file that generate wrote; tests/heterollm/trace/test_tracing.py runs it",
}
"""Commands that are not run here, and why. Of the others, those on a real device or the emulator are not
either, nor those that a real profile must come before: the simulated device and `host` stand for them."""

SLOW = {"simulation", "generate", "auto"}
"""Pages, commands and options whose commands run as slow tests; tests/solver/test_flights.py has ``auto``."""


def name_of(path):
    return str(path.relative_to(ROOT))


# -- reading Markdown --------------------------------------------------------------------------------


def fences(text):
    """Yield the language and the content of each fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2]


def without_fences(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text):
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = set()
    for title in re.findall(r"^#{1,6} +(.+?) *$", without_fences(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = 1
        while slug in found:
            slug = f"{slug.removesuffix(f'-{count - 1}')}-{count}"
            count += 1
        found.add(slug)
    return found


def links(text):
    prose = re.sub(r"`[^`]*`", "", without_fences(text))
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def block_lines(text):
    """Yield the lines of fenced blocks of commands and of indented blocks, continued lines joined."""
    content = "".join(body for language, body in fences(text) if language in ("", "sh", "bash", "console"))
    content += "".join(
        f"{line[4:]}\n" for line in without_fences(text).splitlines() if line.startswith("    ")
    )
    yield from content.replace("\\\n", " ").splitlines()


def commands_in(lines):
    """Yield what follows ``heterollm`` in lines of a shell."""
    for line in lines:
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            if words and words[0].removeprefix(".venv/bin/") == "heterollm":
                yield chatting(words[1:])


def inline_commands(text):
    for code in re.findall(r"`([^`]+)`", without_fences(text)):
        code = " ".join(code.split())
        if code.startswith("heterollm ") and "..." not in code:
            yield chatting(shlex.split(code)[1:])


def chatting(words):
    """Return the words with the command that a model in place of one stands for."""
    is_model = words[:1] and (words[0] == "MODEL" or "/" in words[0] or known_repository(words[0]))
    return ["chat", *words] if is_model else words


# -- the program's parser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program():
    return typer.main.get_command(app)


def parse(command, words):
    """Return what is missing, or an empty text; raise where the program knows no such words. Nothing runs."""
    words = [word for word in words if word != "--debug"]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    try:
        context = command.make_context("heterollm", list(words))
    except Exception as error:
        if type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError", "BadOptionUsage"):
            return str(error) or "arguments"
        raise AssertionError(f"{words}: {error}") from error
    left = [*getattr(context, "_protected_args", ()), *context.args]
    assert not left, f"{words}: what is {left}?"
    return ""


# -- links -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for link in links(page.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path.read_text("utf-8")), link


def pages_of_the_site():
    """Return the pages that the site's navigation names, in its order."""
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    return re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)


def test_every_page_is_named_once_in_the_navigation():
    own = ["index.md" if page.name == "README.md" else page.name for page in PAGES]
    assert sorted(pages_of_the_site()) == sorted(own)


def test_the_readme_is_short():
    assert (ROOT / "README.md").read_text("utf-8").count("\n") <= 90


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material"))), reason="needs the extra [docs]"
)
def test_the_site_builds_strictly_and_needs_no_other_host(tmp_path):
    """Links, anchors and the navigation hold there too, and a page loads nothing from elsewhere."""
    command = [sys.executable, "-Im", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in pages_of_the_site():
        text = (tmp_path / "site" / page).with_suffix(".html").read_text("utf-8")
        assert not re.findall(r"<(?:script|img|iframe)[^>]* src=\"?https?:", text), page
        assert not re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preconnect)[^>]* href=\"?https?:", text), page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    """Modules and tests in backticks; the paper map leaves out the folder ``tests/``."""
    names = re.findall(r"`((?:\w+/)+\w+\.(?:py|cl|md|jsonl|yaml|json))`", page.read_text("utf-8"))
    for name in names:
        here = [ROOT / name, ROOT / "tests" / name, page.parent / name]
        assert any(path.exists() for path in here), name


# -- commands ----------------------------------------------------------------------------------------


def test_the_parser_refuses_what_is_wrong(program):
    assert parse(program, ["generate", "MODEL", "a prompt", "--plan", "layer"]) == ""
    assert parse(program, ["generate", "--plan", "layer"])
    for wrong in (
        ["generate", "MODEL", "PROMPT", "--plans", "x"],
        ["simulate", "--nothing"],
        ["cache", "shows"],
    ):
        with pytest.raises(AssertionError):
            parse(program, wrong)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse(page, program):
    text = page.read_text("utf-8")
    for words in commands_in(block_lines(text)):
        assert parse(program, words) == "", words
    for words in inline_commands(text):
        parse(program, words)  # what is named in passing may leave out its arguments


def test_the_commands_that_ci_runs_are_the_readmes():
    """Both lines under "Try it" are typed as they are by whoever comes here first."""
    lines = list(block_lines((ROOT / "README.md").read_text("utf-8")))
    begin = "python3 -m venv .venv && .venv/bin/pip install -q "
    assert f"{begin}'.[host]' && .venv/bin/heterollm demo" in lines
    assert f"{begin}'.[test]' && .venv/bin/pytest" in lines


def runnable(words):
    if (
        not words
        or words[0] in PARSED_ONLY
        or "FILE" in words
        or "emulator" in words
        or "snapdragon" in words
        or "--cluster" in words
        or (words[0] == "generate" and "plan.json" in words)  # a file that the command before it wrote
    ):
        return False
    if words[0] in ("profile", "plan", "generate", "calibrate"):
        return SIMULATED in words and "none" not in words
    return True


def quick_commands():
    seen = []
    for page in PAGES:
        for words in commands_in(block_lines(page.read_text("utf-8"))):
            if runnable(words) and words not in seen:
                seen.append(words)
                slow = page.stem in SLOW or SLOW & set(words)
                short = shortened(words)
                for run in [words] if short == words else [short, words]:
                    marks = [pytest.mark.slow] if slow or run != short else []
                    yield pytest.param(run, id=f"{page.stem}: {' '.join(run)}", marks=marks)


LONGEST = 512
"""Tokens of a prompt that is not long."""


def shortened(words):
    """Return a command with the first of its models and of its prompts, which is not long."""
    short = list(words)
    for place, (before, word) in enumerate(itertools.pairwise(["", *words])):
        first = word.partition(",")[0]
        if before == "--prompt":
            short[place] = str(min(int(first), LONGEST)) if first.isdigit() else first
        elif before == "simulate":
            short[place] = first
    return short


@pytest.fixture(scope="module")
def simulated_profile(session_cache):
    """The profile that the pages take first, of the simulated device and the bundled model."""
    assert main(["profile", str(BUNDLED), "--device", SIMULATED]) == 0


@pytest.mark.parametrize("words", list(quick_commands()))
def test_quick_commands_run(words, simulated_profile, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    if words[0] == "simulate":
        # tests/heterollm/benchmarks/test_sweep.py sweeps in processes, which import everything first.
        monkeypatch.setattr("heterollm.kernels.threads.allowed_cores", lambda: (0,))
    assert main([str(BUNDLED) if word in CHECKPOINTS else word for word in words]) == 0, (
        capfd.readouterr().err
    )
    assert capfd.readouterr().out


def test_what_is_parsed_only_is_still_a_command(program):
    assert set(PARSED_ONLY) <= set(program.commands)


# -- Python ------------------------------------------------------------------------------------------


def snippets():
    for page in PAGES:
        found = [body for language, body in fences(page.read_text("utf-8")) if language == "python"]
        for number, body in enumerate(found, 1):
            yield pytest.param(body, id=f"{page.stem} {number}")


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("snippet", list(snippets()))
def test_snippets_run(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet.replace("path/or/hub-name", BUNDLED.as_posix()), "snippet", "exec"), {})


# -- generated pages ---------------------------------------------------------------------------------


@pytest.fixture
def generate(monkeypatch):
    """The script that writes what follows from the program."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("generate")


def test_the_worked_example_is_up_to_date(generate):
    """It profiles and solves for two seconds: the README shows its figure."""
    for path, text in generate.example_files().items():
        assert path.read_text("utf-8") == text, "run `python docs/generate.py`"


def test_the_tables_of_fields_are_up_to_date_and_have_every_format(generate):
    for path, text in generate.field_tables.pages().items():
        assert path.read_text("utf-8") == text, "run `python docs/generate.py`"
    page = generate.field_tables.FIELDS_PAGE.read_text("utf-8")
    titles = [table.title for table in generate.field_tables.tables()]
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json"):
        assert file in titles
    assert all(f"## {title}\n" in page for title in titles)


def test_the_command_reference_is_up_to_date(generate):
    assert generate.PAGE.read_text("utf-8") == generate.reference(), "run `python docs/generate.py`"


# -- figures -----------------------------------------------------------------------------------------


def rows_of(name):
    path = ROOT / "bench" / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def figures():
    """The script that writes tables from rows and holds phrases to them."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("figures")
    finally:
        sys.path.remove(str(ROOT / "bench"))


def test_figures_are_those_of_the_rows(figures):
    assert figures.differences() == [], "run `python bench/figures.py`"


def swapped(text, one, other):
    """Return a text in which two spans have changed places."""
    (a, b), (c, d) = sorted((one, other))
    return text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]


NUMBER = r"\d+(?:\.\d+)?"


def test_accuracies_that_are_not_of_one_kind_have_columns_of_their_own(figures):
    row = {"kind": "accuracy", "model": "model", "strength": 1, "method": "float", "calibration_windows": 8}
    rows = [row | {"text": "code", "perplexity": 5.0}, row | {"text": "prose", "perplexity": 9.0}]
    titles, *lines = map(list, figures.accuracy.accuracy_lines(rows))
    assert titles == ["method", "model, code", "model, prose"]
    assert lines == [["float", "5.000", "9.000"]]
    rows = [rows[0], rows[0] | {"strength": 8, "perplexity": 7.0}]
    titles, *lines = map(list, figures.accuracy.accuracy_lines(rows))
    assert titles == ["method", "model", "model, outliers x8"]
    assert lines == [["float", "5.000", "7.000"]]
    rows = [rows[0], rows[0] | {"calibration_windows": 4, "perplexity": 6.0}]
    titles, *lines = map(list, figures.accuracy.accuracy_lines(rows))
    assert titles == ["method", "model, 8 windows calibrate", "model, 4 windows calibrate"]
    assert lines == [["float", "5.000", "6.000"]]


def test_two_cells_that_change_places_are_found(figures):
    tables = 0
    for page, name in figures.TABLES:
        text = (ROOT / page).read_text("utf-8")
        begin, end = (text.index(mark) for mark in figures.marks(name))
        spans = [match.span() for match in re.compile(NUMBER).finditer(text, begin, end)]
        pairs = [pair for pair in itertools.pairwise(spans) if text[slice(*pair[0])] != text[slice(*pair[1])]]
        wrong = swapped(text, *pairs[-1])
        assert f"{page}: a table differs" in figures.differences({page: wrong}), name
        tables += 1
    assert tables >= 10


def test_two_figures_of_prose_that_change_places_are_found(figures):
    held = 0
    for page, phrase in figures.phrases():
        text = figures.flat((ROOT / page).read_text("utf-8"))
        begin = text.index(phrase)
        spans = [match.span() for match in re.compile(NUMBER).finditer(text, begin, begin + len(phrase))]
        for one, other in itertools.pairwise(spans):
            if text[slice(*one)] != text[slice(*other)]:
                assert phrase not in swapped(text, one, other), phrase
                held += 1
    assert held >= 40


# -- what the program prints -------------------------------------------------------------------------


def printed_anchors():
    """Return every section of the troubleshooting page that a message of the program names."""
    found = {}
    for folder in ("kernels", "profiler", "solver", "heterollm"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            for node in ast.walk(ast.parse(text)) if "see(" in text else ():
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "see":
                    assert isinstance(node.args[0], ast.Constant), f"{path}: a section must be a literal"
                    found.setdefault(node.args[0].value, []).append(name_of(path))
    return found


def test_sections_that_messages_name_exist():
    from heterollm.base import see

    named = printed_anchors()
    assert len(named) >= 10
    assert set(named) <= anchors((ROOT / TROUBLESHOOTING).read_text("utf-8"))
    url = see("the-emulator-is-slow").removeprefix("See ").removesuffix("#the-emulator-is-slow.")
    page = Path(url2pathname(urlparse(url).path))
    assert page.read_bytes() == (ROOT / TROUBLESHOOTING).read_bytes()


# -- schemas -----------------------------------------------------------------------------------------


def schema(name):
    return json.loads((ROOT / "docs" / "schemas" / f"{name}.schema.json").read_text("utf-8"))


def sound(name, value):
    return jsonschema.Draft202012Validator(schema(name)).is_valid(value)


def test_schemas_are_schemas():
    paths = sorted((ROOT / "docs" / "schemas").glob("*.json"))
    assert len(paths) == 7
    for path in paths:
        jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text("utf-8")))


def test_the_schemas_are_up_to_date(generate):
    for path, text in generate.schema_files().items():
        assert path.read_text("utf-8") == text, "run `python docs/generate.py`"


@pytest.fixture(scope="module")
def made(session_cache, tmp_path_factory):
    """A plan, a simulated profile and a trace that the program wrote."""
    folder = tmp_path_factory.mktemp("made")
    plan, profile = folder / "plan.json", folder / "simulated.json"
    model = str(BUNDLED)
    assert main(["profile", model, "--device", SIMULATED, "--quick"]) == 0
    assert main(["profile", "export", str(profile)]) == 0
    assert main(["plan", model, "--profile", str(profile), "--plan", "block", "-o", str(plan)]) == 0
    traced = simulate(SimulationRequest(model, prompt=40, decode=2, trace=True)).trace
    good, counts = RangeErrors(1e-8, 1e-8, 1e-8), (0,) * 384
    linears = (
        LinearCalibration(0, "gate_up", 4.0, (3.0, 2.0), (1.5, 1.0), counts, 1.0, (), good),
        LinearCalibration(0, "down", 6.0, (8.0,), (2.0,), counts, 1.0, (), good),
    )
    ffns = (FfnCalibration(0, 2.0, 9.0, good, good),)
    calibration = Calibration("0" * 64, "tiny", "1" * 64, 512, 2, 2, 64, linears, ffns)
    return {
        "calibration": json.loads(msgspec.json.encode(calibration)),
        "plan": json.loads(plan.read_bytes()),
        "profile": json.loads(profile.read_bytes()),
        "trace": json.loads("".join(trace_lines(traced))),
    }


def test_what_the_program_writes_is_sound(made, sample_profile):
    for name, value in made.items():
        jsonschema.validate(value, schema(name), jsonschema.Draft202012Validator)
    assert sound("profile", json.loads(sample_profile().to_json()))
    files = sorted((ROOT / "kernels" / "sim" / "soc").glob("*.yaml"))
    assert len(files) == 9
    for path in files:
        jsonschema.validate(yaml.safe_load(path.read_text("utf-8")), schema("soc"))
    rows = rows_of("ablation")
    assert rows
    assert all(sound("bench-row", row) for row in rows)


@pytest.mark.parametrize(
    "page", [ROOT / "docs" / name for name in ("plan-format.md", "profile-format.md")], ids=name_of
)
def test_the_examples_of_the_pages_are_sound(page):
    examples = [json.loads(body) for language, body in fences(page.read_text("utf-8")) if language == "json"]
    assert examples
    assert all(sound(page.stem.partition("-")[0], example) for example in examples)


def loads(name, value):
    """Whether the program's own loader takes it."""
    loader = {
        "calibration": Calibration.from_json,
        "plan": Plan.from_json,
        "profile": Profile.from_json,
        "trace": trace_from_json,
    }[name]
    try:
        loader(json.dumps(value))
    except (CalibrationError, PlanError, ProfileError, TraceError):
        return False
    return True


@pytest.mark.parametrize(
    "edit",
    [
        lambda soc: soc.update(version=2),
        lambda soc: soc.update(based_on="snapdragon-9"),
        lambda soc: soc.update(remark="mine"),
        lambda soc: soc["npu"]["tile"].update(value=2.5),
        lambda soc: soc["npu"]["tile"].update(value=0),
        lambda soc: soc["npu"]["tile"].update(unit="px"),
        lambda soc: soc["npu"]["tile"].update(source="guessed"),
        lambda soc: soc["npu"]["tile"].pop("source"),
    ],
)
def test_the_schema_of_a_soc_refuses_what_the_loader_refuses(edit):
    path = ROOT / "kernels" / "sim" / "soc" / "snapdragon-8gen3-paper.yaml"
    value = yaml.safe_load(path.read_text("utf-8"))
    edit(value)
    assert not sound("soc", value)
    with pytest.raises(OptionError):
        parse_soc(yaml.safe_dump(value), "own.yaml")


EDITS = [
    # Name, edit, and who refuses the result: the schema (and the loader), or the loader alone.
    ("calibration", lambda made: made, None),
    ("calibration", lambda made: made.update(version=1), "schema"),
    ("calibration", lambda made: made.update(windows=-1), "schema"),
    ("calibration", lambda made: made.update(weights_key="0" * 65), "schema"),
    ("calibration", lambda made: made.pop("linears"), "schema"),
    ("calibration", lambda made: made["linears"][0].update(group="gate up"), "schema"),
    ("calibration", lambda made: made["linears"][0].update(inputs=-1.0), "schema"),
    ("calibration", lambda made: made["linears"][0].update(remark="mine"), "schema"),
    ("calibration", lambda made: made["ffns"][0].update(partial="9"), "schema"),
    ("calibration", lambda made: made["linears"][0].update(outputs=[3.0]), "loader"),
    ("calibration", lambda made: made["linears"][0]["histogram"].pop(), "loader"),
    ("calibration", lambda made: made["linears"][1].update(inputs=1e-40), "loader"),
    ("calibration", lambda made: made["linears"].append(made["linears"][0]), "loader"),
    ("calibration", lambda made: made["linears"].pop(), "loader"),
    ("calibration", lambda made: made["ffns"][0].update(partial=0.0), "loader"),
    ("plan", lambda plan: plan, None),
    ("plan", lambda plan: plan.update(calibration="0" * 32), None),
    ("plan", lambda plan: plan.update(calibration=""), "schema"),
    ("plan", lambda plan: plan.update(schema_version=1), "schema"),
    ("plan", lambda plan: plan.pop("shape"), "schema"),
    ("plan", lambda plan: plan.update(chunk_length=0), "schema"),
    ("plan", lambda plan: plan.update(remark="mine"), "schema"),
    ("plan", lambda plan: plan["entries"][0].update(group="Attention"), "schema"),
    ("plan", lambda plan: plan["entries"][0].update(remark="mine"), "schema"),
    ("plan", lambda plan: plan["entries"][0].update(lengths=[1]), "schema"),
    ("plan", lambda plan: plan["entries"][0]["placement"].update(npu_row=[1]), "schema"),
    ("plan", lambda plan: plan["entries"][0]["placement"].update(npu_lengths=[0]), "schema"),
    ("plan", lambda plan: plan["entries"][0]["placement"].update(predicted_us=-1), "schema"),
    (
        "plan",
        lambda plan: plan["entries"][0].update(
            group="ffn", placement={"npu_rows": [256], "npu_lengths": [32]}
        ),
        "schema",
    ),
    ("plan", lambda plan: plan.pop("sync"), "schema"),
    ("plan", lambda plan: plan["sync"].update(decode="guess"), "schema"),
    ("plan", lambda plan: plan["entries"][0]["placement"].update(type="shadow"), "schema"),
    ("plan", lambda plan: plan.update(request={"level": "tensor"}), "schema"),
    ("plan", lambda plan: plan["entries"][0].update(lengths=[9, 8]), "loader"),
    ("plan", lambda plan: plan["slices"].pop(), "loader"),
    (
        "plan",
        lambda plan: plan["entries"][0].update(
            group="ffn", placement={"type": "rows", "npu_rows": [256, 512], "npu_lengths": [32]}
        ),
        "loader",
    ),
    ("plan", lambda plan: plan.update(chunk_length=1024.0), "loader"),
    ("profile", lambda profile: profile, None),
    ("profile", lambda profile: profile.update(schema_version="1"), "schema"),
    ("profile", lambda profile: profile.pop("records"), "schema"),
    ("profile", lambda profile: profile["description"].pop("time"), "schema"),
    ("profile", lambda profile: profile["description"].pop("cache_bytes"), "schema"),
    ("profile", lambda profile: profile.update(schema_version=1), "schema"),
    ("profile", lambda profile: profile["runs"].update(now={"finished": True}), "schema"),
    ("profile", lambda profile: profile["records"][0].update(kind="linea"), "schema"),
    ("profile", lambda profile: profile["records"][0].update(samples_us=[0.0]), "schema"),
    ("profile", lambda profile: profile["records"][0].update(samples_us=[]), "loader"),
    ("profile", lambda profile: profile["records"][0].pop("taken_s"), "schema"),
    ("profile", lambda profile: profile["records"][0].update(remark="mine"), "schema"),
    ("profile", lambda profile: profile["records"][0]["key"].pop("code"), "schema"),
    ("profile", lambda profile: profile["records"][0]["key"]["point"].update(bits=5), "schema"),
    ("profile", lambda profile: profile["records"][0]["key"]["point"].update(block=0), "loader"),
    ("profile", lambda profile: profile["records"][0]["key"]["point"].update(tokens=0), "schema"),
    ("profile", lambda profile: profile.update(fingerprint="0" * 16), "loader"),
    ("profile", lambda profile: profile["description"].update(gpu="another"), "loader"),
    ("profile", lambda profile: profile["records"][0]["key"]["point"].update(tokens=2**52), "loader"),
    ("trace", lambda trace: trace, None),
    ("trace", lambda trace: trace["otherData"].update(heterollm_trace=2), "schema"),
    ("trace", lambda trace: trace["otherData"].update(time_kind="guessed"), "schema"),
    ("trace", lambda trace: trace["traceEvents"][-1].update(tid=4), "schema"),
    ("trace", lambda trace: trace["traceEvents"][-1].update(dur=-1), "schema"),
    ("trace", lambda trace: trace["traceEvents"][-1]["args"].pop("operator"), "schema"),
    ("trace", lambda trace: trace["traceEvents"][-1].update(dur="1"), "schema"),
    ("trace", lambda trace: trace["traceEvents"][-1]["args"].update(remark="mine"), "schema"),
    # A pass that an event names must be there.
    ("trace", lambda trace: trace["traceEvents"][-1]["args"].update({"pass": 999}), "loader"),
]


@pytest.mark.parametrize(("name", "edit", "refused_by"), EDITS, ids=range(len(EDITS)))
def test_schema_and_loader_refuse_bad_edits(name, edit, refused_by, made):
    value = copy.deepcopy(made[name])
    if name == "profile":  # a few records say as much as all
        value["records"] = value["records"][:3]
    edit(value)
    assert loads(name, value) == (refused_by is None)
    assert sound(name, value) == (refused_by != "schema")
