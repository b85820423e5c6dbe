"""No option is accepted and ignored: each acts with the arguments of its row, and is refused without."""

import json
from dataclasses import asdict, is_dataclass, replace

import msgspec
import pytest
import typer

from heterollm.base import OptionError
from heterollm.benchmarks import expand_simulated
from heterollm.cli import main
from heterollm.cli.command_line import app
from heterollm.cli.effects import command_effects
from heterollm.planning import LOAD_EFFECTS, LoadOptions
from heterollm.simulate import SimulationRequest, simulate
from heterollm.solver import AttentionRequest, ExpertsRequest, PlanRequest

MODEL = "tiny-python-lm"


class Recorded(Exception):
    """The end of a command at the call that does its work."""


TECHNIQUE = "--technique shadowattn --scales stepped --calibration FILE"
SPARSE = {
    "keep": f"{TECHNIQUE} --keep 0.5",
    "keep_by": f"{TECHNIQUE} --keep-by uniform",
    "score_buckets": f"{TECHNIQUE} --score-buckets 5",
    "estimator": f"{TECHNIQUE} --estimator gpu",
}
WEIGHTS = {
    "precision": "--precision fp16",
    "group_size": "--group-size 64",
    "asymmetric": "--asymmetric",
    "scales": "--scales stepped",
    "calibration": "--scales stepped --calibration FILE",
}
LOADED = {
    "device": "--device host",
    "plan": "--plan gpu",
    **WEIGHTS,
    **SPARSE,
    "lora": "--lora FOLDER",
    "context": "--context 64",
    "techniques": TECHNIQUE,
    "overflow": "--technique npumoe --calibration FILE --overflow drop",
    "gpu_threads": "--gpu-threads 1",
    "npu_threads": "--npu-threads 0",
    "power": "--power balanced",
    "allow_slow": "--device emulator --allow-slow",
    "sync": "--sync poll",
    "allow_fallback": "--allow-fallback",
    "experts_gib": "--experts-gib 1",
    "kv_bits": "--kv-bits 8",
    "speculative": "--speculative lookup",
    "guesses": "--speculative lookup --guesses 2",
    "profile": "--profile quick",
}
RUN_ALONE = ("sync", "allow_fallback", "speculative", "guesses")
TOKENS = {
    "temperature": "--temperature 0.5",
    "top_k": "--temperature 0.5 --top-k 3",
    "top_p": "--temperature 0.5 --top-p 0.5",
    "min_p": "--temperature 0.5 --min-p 0.1",
    "repetition_penalty": "--repetition-penalty 1.5",
    "presence_penalty": "--presence-penalty 1",
    "frequency_penalty": "--frequency-penalty 1",
    "seed": "--temperature 0.5 --seed 3",
}
ROWS = {
    "generate": {
        **LOADED,
        **TOKENS,
        "file": "--file FILE",
        "prompts": "--prompts FILE",
        "system": "--system s",
        "raw": "--raw",
        "max_new_tokens": "--max-new-tokens 3",
        "stop": "--stop x",
        "json_schema": "--json-schema {}",
        "grammar": "--grammar FILE",
        "top_logprobs": "--top-logprobs 2",
        "trace": "--trace OUT",
        "as_json": "--json",
    },
    "chat": {**LOADED, **TOKENS, "max_new_tokens": "--max-new-tokens 3", "system": "--system s"},
    "serve": {
        **LOADED,
        **TOKENS,
        "max_tokens": "--max-tokens 9",
        "host": "--host ::1",
        "port": "--port 9",
        "name": "--name n",
        "api_key": "--api-key k",
        "cors": "--cors http://a",
        "sessions_gib": "--sessions-gib 1",
        "prefixes_gib": "--prefixes-gib 1",
        "idle_minutes": "--idle-minutes 2",
        "no_exact": "--no-exact",
        "gaps": "--gaps 2",
        "queue": "--queue 2",
        "connections": "--connections 5",
        "live": "--live",
    },
    "eval": {
        **{
            name: LOADED[name] for name in ("device", "plan", "lora", "kv_bits", "gpu_threads", "npu_threads")
        },
        **WEIGHTS,
        "text": "--text OTHER",
        "windows": "--windows 2",
        "window": "--window 64",
        "alone": "--alone",
        "as_json": "--json",
    },
    "plan": {
        **WEIGHTS,
        **SPARSE,
        "device": "--device host",
        "profile": "--profile FILE",
        "plan": "--plan block",
        "prompt": "--prompt 8",
        "decode": "--decode 0",
        "explain": "--explain",
        "steps": "--steps",
        "output": "-o OUT",
        "html": "--html OUT",
        "context": "--context 64",
        "gpu_share": "--gpu-share 0.5",
        "energy_weight": "--energy-weight 0.5",
        "forbid": "--forbid row",
        "npu_gib": "--npu-gib 1",
        "histogram": "--histogram 64:1",
        "in_flight": "--in-flight 2",
        "techniques": TECHNIQUE,
        "overflow": "--technique npumoe --calibration FILE --overflow drop",
        "build_budget": "--histogram 64:1 --build-budget 30s",
        "gpu_threads": "--gpu-threads 1",
        "npu_threads": "--npu-threads 0",
        "power": "--power balanced",
        "as_json": "--json",
    },
    "export": {
        **{name: row for name, row in LOADED.items() if name not in RUN_ALONE},
        "output": "-o OTHER",
        "profile": "--plan tensor --profile FILE",
        "soc": "--device snapdragon --soc 57",
        "context_layers": "--device snapdragon --soc 57 --context-layers 0",
        "as_json": "--json",
    },
    "compile": {
        **WEIGHTS,
        **SPARSE,
        "soc": "--soc 69",
        "plan": "--plan npu",
        "profile": "--plan tensor --profile FILE",
        "techniques": TECHNIQUE,
        "overflow": "--technique npumoe --calibration FILE --overflow drop",
        "prompt": "--prompt 64",
        "decode": "--decode 0",
        "context": "--context 64",
        "context_layers": "--context-layers 2",
        "as_json": "--json",
    },
    "calibrate": {
        "output": "-o OUT",
        "windows": "--windows 2",
        "window": "--window 64",
        "head_importance": "--head-importance",
        "precision": "--precision w8a8",
        "group_size": "--group-size 64",
        "int16_limit": "--precision w8a8 --int16-limit 30",
        "pruned": "--precision w8a8 --pruned 0.5",
        "loss_limit": "--precision w8a8 --loss-limit 2",
        "gpu_threads": "--gpu-threads 1",
        "as_json": "--json",
    },
    "profile": {
        "device": "--device host",
        "gpu_threads": "--gpu-threads 1",
        "npu_threads": "--npu-threads 0",
        "power": "--power balanced",
        "precision": "--precision fp16",
        "group_size": "--group-size 64",
        "scales": "--scales stepped",
        "budget": "--budget 9s",
        "quick": "--quick",
        "update": "--update",
        "characterise": "--characterise",
        "techniques": "--technique npumoe",
        "no_tune": "--no-tune",
        "as_json": "--json",
    },
    "doctor": {
        "device": "--device host",
        "gpu_threads": "--gpu-threads 1",
        "npu_threads": "--npu-threads 0",
        "power": "--power balanced",
        "as_json": "--json",
    },
    "demo": {
        "device": "--device host",
        "max_new_tokens": "--max-new-tokens 3",
        "sync": "--sync poll",
        "as_json": "--json",
    },
    "pull": {"gguf": "--gguf *"},
    "convert": {
        "output": "-o OTHER",
        "group_size": "--group-size 64",
        "asymmetric": "--asymmetric",
        "lora": "--lora FOLDER",
        "as_json": "--json",
    },
    "bench": {
        "prompt": "-p 8",
        "decode": "-n 3",
        "pairs": "-pg 8,2",
        "depth": "-d 4",
        "repetitions": "-r 2",
        "engine": "--engine transformers",
        "plan": "--plan gpu",
        "length_policy": "--plan layer --threads 1+1 --length-policy pipe",
        "sync": "--plan layer --threads 1+1 --sync poll",
        "precision": "--precision fp16",
        "threads": "--threads 1+1",
        "gpu_threads": "--gpu-threads 1",
        "npu_threads": "--npu-threads 1",
        "device": "--device emulator",
        "group_size": "--group-size 64",
        "scales": "--scales stepped",
        "calibration": "--plan layer --scales stepped --calibration FILE",
        "techniques": "--technique npumoe --calibration FILE",
        "overflow": "--technique npumoe --calibration FILE --overflow drop",
        "power": "--device snapdragon --power balanced",
        "experts_gib": "--experts-gib 1",
        "seed": "--seed 3",
        "patience": "--patience 2",
        "memory_gib": "--memory-gib 3",
        "no_trace": "--no-trace",
        "traces": "--traces FOLDER",
        "profile_first": "--profile-first",
        "time_limit": "--time-limit 9s",
        "form": "--format csv",
        "as_json": "--json",
        "output": "-o OUT",
        "picture": "--picture PICTURE",
        "html": "--html OUT",
        "saved": "--from FILE",
    },
    "simulate": {
        "soc": "--soc snapdragon-8elite",
        "prompt": "--prompt 64",
        "decode": "--decode 2",
        "plan": "--plan layer",
        "plan_for": "--plan-for prompt",
        "length_policy": "--plan layer --length-policy online",
        "in_flight": "--in-flight 2",
        "techniques": "--technique shadowattn",
        "sync": "--sync finish",
        "gpu_load": "--gpu-load 60fps:5ms",
        "what_if": "--what-if npu.execute_us=9",
        "every_form": "--soc snapdragon-8gen3-paper --every-form",
        "calibrated": "--calibrated",
        "pruned": "--plan layer --technique llm.npu --pruned 0.5",
        "outlier_share": "--plan layer --technique llm.npu --outlier-share 0.1",
        "overflow": "--technique npumoe --overflow drop",
        "imbalance": "MIXTURE --imbalance 3",
        "head_imbalance": "--technique shadowattn --head-imbalance 2",
        "head_pipeline": "--technique shadowattn --head-pipeline heads",
        "numerics": "--numerics",
        "keep": "--technique shadowattn --keep 0.5",
        "keep_by": "--technique shadowattn --keep-by uniform",
        "score_buckets": "--technique shadowattn --score-buckets 5",
        "estimator": "--technique shadowattn --estimator gpu",
        "timeline": "--timeline OUT",
        "explain": "--explain",
        "jobs": "--prompt 64,256 --jobs 1",
        "cluster": "--prompt 64,256 --cluster dask",
        "form": "--format csv",
        "output": "-o OUT",
        "as_json": "--json",
    },
    "devices": {"as_json": "--json"},
    "list": {"as_json": "--json"},
    "rm": {"yes": "--yes"},
    "trace": {"png": "--png PICTURE", "html": "--html PAGE", "as_json": "--json"},
    "profile list": {"as_json": "--json"},
    "profile show": {
        "everything": "--all",
        "plots": "--plots FOLDER",
        "html": "--html OUT",
        "as_json": "--json",
    },
    "profile compare": {"as_json": "--json"},
    "profile export": {},
    "profile import": {},
    "cache list": {"as_json": "--json"},
    "cache clear": {"yes": "--yes"},
    "cache path": {},
    "config show": {"as_json": "--json"},
    "config path": {},
}
"""By command and option: arguments with which the option has an effect, the option last."""


def tree(group=None, above=""):
    """Yield the words and the command of everything that runs."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        yield f"{above}{name}", command
        if hasattr(command, "commands"):
            yield from tree(command, f"{above}{name} ")


def options_of(command):
    """Return the names of the options of a command."""
    return {
        param.name for param in command.params if param.param_type_name == "option" and param.name != "help"
    }


def test_every_option_has_a_row():
    groups = {"cache", "config"}
    found = {words: options_of(command) for words, command in tree() if words not in groups}
    assert {words: set(rows) for words, rows in ROWS.items()} == found


def plain(value):
    """Return a value that compares by content."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return repr(value) if not callable(value) else ""


BASES = {
    "generate": ("generate MODEL x", "heterollm.llm.LLM.load"),
    "chat": ("chat MODEL", "heterollm.llm.LLM.load"),
    "serve": ("serve MODEL", "heterollm.llm.LLM.load"),
    "eval": ("eval MODEL --text FILE", "heterollm.benchmarks.evaluate"),
    "plan": ("plan MODEL", "heterollm.loading.plan_for"),
    "export": ("export MODEL -o OTHER1", "heterollm.exporting.export_model"),
    "compile": ("compile MODEL --soc 57", "heterollm.planning.precompile"),
    "calibrate": ("calibrate MODEL", "heterollm.calibration.calibrate"),
    "profile": ("profile MODEL", "heterollm.planning.ProfilingSession"),
    "doctor": ("doctor", "heterollm.doctor.diagnose"),
    "demo": ("demo", "heterollm.benchmarks.run_demo"),
    "convert": ("convert MODEL -o OTHER1", "heterollm.model.convert_model"),
    "bench": ("bench MODEL", "heterollm.benchmarks.run_bench"),
}
"""For each command that works: a line to which options are added, and the function that gets them."""

BESIDE = {
    *(("generate", name) for name in ("file", "prompts", "system", "raw", "max_new_tokens", "stop")),
    ("generate", "as_json"),
    *(("generate", name) for name in ("json_schema", "grammar", "top_logprobs", *TOKENS)),
    *(("chat", name) for name in ("max_new_tokens", "system", *TOKENS)),
    *(("serve", name) for name in ROWS["serve"] if name not in LOADED and name != "live"),
    *(("generate", "profile"), ("chat", "profile"), ("serve", "profile"), ("demo", "as_json")),
    *((command, "as_json") for command in ("eval", "export", "compile", "calibrate", "profile", "doctor")),
    ("convert", "as_json"),
    *(("plan", name) for name in ("profile", "prompt", "decode", "explain", "steps", "output", "html")),
    ("plan", "as_json"),
    *(("profile", name) for name in ("budget", "quick", "update", "characterise", "techniques", "no_tune")),
    *(("bench", name) for name in ("profile_first", "form", "as_json", "output", "picture", "html", "saved")),
}
"""Options of the answer or the output, which other functions get; the tests of their commands hold them."""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Return a function that runs a line and returns what its work was given, or its error."""
    for name in ("FILE", "OTHER"):
        (tmp_path / name).write_text("text of a file\n")
    (tmp_path / "FOLDER").mkdir()
    monkeypatch.chdir(tmp_path)

    def run(line, target=None):
        seen = []

        def record(*arguments, **options):
            options.pop("progress", None)
            seen.append(plain([list(arguments), options]))
            raise Recorded

        with pytest.MonkeyPatch.context() as patch:
            if target is not None:
                patch.setattr(target, record)
            code = main([MODEL if word == "MODEL" else word for word in line.split()])
        return code, seen

    return run


@pytest.mark.parametrize(
    ("command", "option"),
    [(command, name) for command in BASES for name in ROWS[command] if (command, name) not in BESIDE],
)
def test_each_option_reaches_the_work(command, option, call, capsys):
    line, target = BASES[command]
    *before, given = (
        ROWS[command][option].rsplit(" --", 1) if " --" in ROWS[command][option] else (ROWS[command][option],)
    )
    without = f"{line} {before[0]}" if before else line
    _, plainly = call(without, target)
    _, asked = call(f"{line} {ROWS[command][option]}", target)
    assert asked, capsys.readouterr().err
    assert plainly != asked, given


IDLE = [
    ("generate", "--keep 0.2", "shadowattn"),
    ("generate", "--keep-by mass", "shadowattn"),
    ("chat", "--score-buckets 5", "shadowattn"),
    ("serve", "--estimator gpu", "shadowattn"),
    ("generate", "--overflow drop", "npumoe"),
    ("generate", "--top-k 5", "temperature 0"),
    ("generate", "--top-p 0.5", "temperature 0"),
    ("chat", "--min-p 0.5", "temperature 0"),
    ("generate", "--temperature 0 --seed 7", "temperature 0"),
    ("generate", "--guesses 2", "nothing guesses"),
    ("generate", "--precision fp16 --group-size 64", "no blocks"),
    ("generate", "--precision fp16 --asymmetric", "no blocks"),
    ("generate", "--calibration FILE", "stepped"),
    ("generate", "--plan gpu --scales stepped --calibration FILE", "integer NPU graphs"),
    ("generate", "--device host --power balanced", "Snapdragon"),
    ("generate", "--device sim:snapdragon-8gen3 --power default", "Snapdragon"),
    ("generate", "--device snapdragon --gpu-threads 1", "CPU cores"),
    ("generate", "--device emulator --npu-threads 1", "CPU cores"),
    ("generate", "--device intel --gpu-threads 1", "CPU cores"),
    ("generate", "--device intel --allow-slow", "emulator"),
    ("generate", "--device host --allow-slow", "emulator"),
    ("generate", "--plan gpu --sync poll", "waits"),
    ("generate", "--plan gpu --allow-fallback", "NPU"),
    ("generate", "--device sim:snapdragon-8gen3 --allow-fallback", "never fails"),
    ("generate", "--device sim:snapdragon-8gen3 --experts-gib 1", "no storage"),
    ("serve", "--plan gpu --profile quick", "needs no times"),
    ("eval", "--precision fp16 --scales free", "no blocks"),
    ("plan", "--keep 0.3", "shadowattn"),
    ("plan", "--profile FILE --device host", "--profile"),
    ("plan", "--json --explain", "rejected"),
    ("plan", "--json --prompt 8", "for all lengths"),
    ("plan", "--build-budget 9s", "none are named"),
    ("plan", "--device sim:snapdragon-8gen3 --gpu-threads 1", "threads"),
    ("export", "--soc 57", "Snapdragon"),
    ("export", "--device snapdragon --context-layers 1", "how many layers"),
    ("export", "--plan gpu --profile FILE", "needs no times"),
    ("export", "--device host --allow-slow", "emulator"),
    ("compile", "--overflow pad", "npumoe"),
    ("compile", "--plan layer --profile FILE", "need no times"),
    ("calibrate", "--pruned 0.5", "w8a8"),
    ("calibrate", "--int16-limit 9", "w8a8"),
    ("profile", "--precision fp16 --group-size 64", "no blocks"),
    ("profile", "--npu-threads 0 --characterise", "NPU"),
    ("profile", "--quick --no-tune", "tunes"),
    ("doctor", "--device host --power burst", "Snapdragon"),
    ("bench", "--plan gpu --sync poll", "--sync poll"),
    ("bench", "--plan tensor --length-policy pipe", "--length-policy pipe"),
    ("bench", "--overflow drop", "npumoe"),
    ("bench", "--precision fp16 --group-size 64", "no blocks"),
    ("bench", "--device host --power balanced", "Snapdragon"),
    ("bench", "--engine transformers --experts-gib 1", "--experts-gib"),
]
"""Commands with arguments whose last option has no effect, and a word of the reason."""


@pytest.mark.parametrize(("command", "arguments", "reason"), IDLE)
def test_an_option_without_effect_is_refused_with_the_reason(command, arguments, reason, call, capsys):
    line, target = BASES[command]
    code, seen = call(f"{line} {arguments}", target)
    said = capsys.readouterr().err
    assert (code, seen) == (1, [])
    assert "changes nothing" in said
    assert "--" + arguments.rsplit("--", 1)[1] in said
    assert reason in said


SIMULATED_IDLE = [
    ("--pruned 0.5", "llm.npu"),
    ("--outlier-share 0.1", "llm.npu"),
    ("--technique shadowattn --plan layer --pruned 0.5", "llm.npu"),
    ("--keep 0.2", "shadowattn"),
    ("--head-pipeline ordered", "shadowattn"),
    ("--overflow drop", "npumoe"),
    ("--imbalance 3", "no experts"),
    ("--head-imbalance 2", "shadowattn"),
    ("--soc snapdragon-8gen3-paper --calibrated", "integer_graphs"),
    ("--plan gpu --calibrated", "no NPU graphs"),
    ("--plan block --every-form", "every form"),
    ("--plan gpu --sync finish", "nothing waits"),
    ("--plan gpu,npu --plan-for prompt", "follow a rule"),
    ("--plan tensor --length-policy pipe", "npu and layer"),
    ("--plan gpu --in-flight 2", "level gpu"),
    ("--jobs 2", "one case"),
    ("--prompt 64,256 --timeline OUT", "one case"),
]


@pytest.mark.parametrize(("arguments", "reason"), SIMULATED_IDLE)
def test_an_option_without_effect_in_any_simulated_case_is_refused(arguments, reason, call, capsys):
    code, _ = call(f"simulate qwen1.5-0.5b {arguments}")
    said = capsys.readouterr().err
    assert code == 1
    assert "changes nothing" in said
    assert reason in said


def test_an_option_of_a_grid_has_an_effect_in_one_case():
    base = SimulationRequest("qwen1.5-0.5b", attention=AttentionRequest(keep=0.5), pruned=0.5)
    found = expand_simulated(
        base,
        {"keep": 0.5, "sync": "finish"},
        level=["gpu", "tensor"],
        sync=["finish"],
        techniques=[(), ("shadowattn",)],
    )
    kept = {(one.level, one.techniques): (one.attention.keep, one.sync, one.pruned) for one in found}
    usual = SimulationRequest("x")
    assert kept["tensor", ("shadowattn",)] == (0.5, "finish", usual.pruned)
    assert kept["tensor", ()] == (usual.attention.keep, "finish", usual.pruned)
    assert kept["gpu", ()] == (usual.attention.keep, usual.sync, usual.pruned)


@pytest.mark.parametrize(
    "options",
    [
        {"power": "balanced", "device": "host"},
        {"guesses": 3},
        {"length_policy": "pipe"},
        {"allow_slow": True, "device": "host"},
        {"request": PlanRequest(gpu_share=0.5), "plan": "layer"},
        {"request": PlanRequest(attention=AttentionRequest(keep=0.5))},
        {"request": PlanRequest(experts=ExpertsRequest("drop"))},
    ],
)
def test_the_api_refuses_as_the_command_does(options):
    with pytest.raises(OptionError, match="changes nothing") as raised:
        LoadOptions(**options)
    assert raised.value.fix


@pytest.mark.parametrize(
    "options",
    [
        {"pruned": 0.5},
        {"level": "gpu", "sync": "poll"},
        {"imbalance": 3.0},
        {"experts": ExpertsRequest("drop")},
    ],
)
def test_a_simulation_refuses_as_the_command_does(options):
    with pytest.raises(OptionError, match="changes nothing"):
        simulate(replace(SimulationRequest("qwen1.5-0.5b"), **options))


def test_every_condition_is_about_options_that_exist():
    names = {name for _, command in tree() for name in options_of(command)}
    library = {"symmetric", "length_policy"}
    for words, command in tree():
        own = {
            name
            for effect in command_effects(tuple(words.split()))
            for name in effect.names.split()
            if effect not in LOAD_EFFECTS
        }
        assert own <= options_of(command), words
    assert {name for effect in LOAD_EFFECTS for name in effect.names.split()} <= names | library


FILE = """\
[defaults]
power = "balanced"
allow-fallback = true
keep = 0.5
calibration = "FILE"
guesses = 4
seed = 3
group-size = 64
pruned = 0.5
"""


def test_defaults_of_a_file_apply_only_where_they_have_an_effect(call, tmp_path, monkeypatch, capsys):
    (tmp_path / "heterollm.toml").write_text(FILE)
    monkeypatch.setenv("HETEROLLM_CONFIG", str(tmp_path / "heterollm.toml"))
    line, target = BASES["generate"]
    _, ((_, options),) = call(f"{line} --device host --plan gpu --precision fp16", target)
    usual = LoadOptions()
    for name in ("power", "group_size", "calibration", "guesses", "allow_fallback"):
        assert options.get(name, plain(getattr(usual, name))) == plain(getattr(usual, name)), name
    assert options.get("request", "None") == "None"
    _, ((_, options),) = call(f"{line} --device snapdragon", target)
    assert (options["power"], options["group_size"]) == ("'balanced'", "64")
    assert "power" in options["defaults"]
    code, _ = call("simulate qwen1.5-0.5b --prompt 32 --decode 0 --plan gpu --json")
    assert code == 0
    assert json.loads(capsys.readouterr().out)["modelled"]["pruned"] == SimulationRequest("x").pruned


def test_a_default_of_a_file_is_left_alone_where_the_model_has_no_use_for_it():
    asked = LoadOptions(experts_gib=2.0, group_size=64, defaults=frozenset({"experts_gib", "group_size"}))
    assert asked.experts_gib == 2.0
