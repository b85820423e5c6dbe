"""The container and the service of the server: built, run and verified where a tool is here, else read."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import typer

from heterollm.cli.command_line import app

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "packaging" / "Dockerfile"
SERVICE = ROOT / "packaging" / "heterollm.service"
ENVIRONMENT = ROOT / "packaging" / "heterollm.environment"
INSTALLED = "/opt/heterollm/bin/heterollm"


def parse(words):
    """Read a command of the program, without running it."""
    command = typer.main.get_command(app).commands[words[0]]
    return command.make_context(words[0], words[1:]).params


def default_port():
    [port] = [param for param in typer.main.get_command(app).commands["serve"].params if param.name == "port"]
    return port.default


# -- the container -----------------------------------------------------------------------------------


def stages(text):
    """Return the instructions of each stage of a Dockerfile: their names and the text after them."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append((name, " ".join(rest.split())))
    return found


def of(stage, name):
    return [rest for own, rest in stage if own == name]


def faults(text):
    """Yield broken rules of a Dockerfile."""
    built = stages(text)
    named = set()
    for stage in built:
        image, *alias = stage[0][1].split(" AS ")
        tag = image.rpartition(":")[2] if ":" in image else ""
        if image not in named and (not tag or tag == "latest"):
            yield f"{image} has no tag of a version"
        named |= {*alias}
        if of(stage, "ADD"):
            yield "ADD, where COPY does"
        for run in of(stage, "RUN"):
            if "apt-get install" in run and ("--no-install-recommends" not in run or "rm -rf" not in run):
                yield "apt-get leaves lists or recommended packages"
            if "pip install" in run and "--no-cache-dir" not in run:
                yield "pip leaves its cache"
            if "sudo" in run.split():
                yield "sudo"
    last = built[-1]
    users = of(last, "USER")
    if not users or users[-1].partition(":")[0] in ("root", "0"):
        yield "the user is root"
    for name in ("HEALTHCHECK", "EXPOSE", "VOLUME"):
        if not of(last, name):
            yield f"no {name}"
    for name in ("ENTRYPOINT", "CMD"):
        if not of(last, name)[-1:] or not of(last, name)[-1].startswith("["):
            yield f"{name} needs a shell"


def test_the_dockerfile_keeps_the_rules():
    assert list(faults(DOCKERFILE.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("USER 10001:10001\n", "", "the user is root"),
        ("USER 10001:10001", "USER root", "the user is root"),
        ("python:3.11-slim-bookworm\n", "python:latest\n", "python:latest has no tag of a version"),
        ("python:3.11-slim-bookworm\n", "python\n", "python has no tag of a version"),
        ("HEALTHCHECK", "LABEL", "no HEALTHCHECK"),
        ("EXPOSE 8080\n", "", "no EXPOSE"),
        ("VOLUME /cache\n", "", "no VOLUME"),
        ("COPY docs docs", "ADD docs docs", "ADD, where COPY does"),
        (" --no-cache-dir", "", "pip leaves its cache"),
        (" --no-install-recommends", "", "apt-get leaves lists or recommended packages"),
        ('ENTRYPOINT ["heterollm"]', "ENTRYPOINT heterollm", "ENTRYPOINT needs a shell"),
    ],
)
def test_the_rules_find_faults(before, after, fault):
    text = DOCKERFILE.read_text("utf-8")
    assert before in text
    assert fault in faults(text.replace(before, after))


def test_the_container_has_all_that_the_package_needs():
    first, last = stages(DOCKERFILE.read_text("utf-8"))
    copied = {source for line in of(first, "COPY") for source in line.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders = {"heterollm", *project["tool"]["setuptools"]["package-dir"].values()}
    data = {
        pattern.split("/")[0]
        for one in project["tool"]["setuptools"]["data-files"].values()
        for pattern in one
    }
    assert (
        folders
        | data
        | {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
        <= copied
    )
    [install] = [run for run in of(first, "RUN") if "pip install" in run]
    extras = re.search(r"'\.\[([\w,]+)\]'", install)[1].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])
    assert "serve" in extras
    [environment] = of(last, "ENV")
    kept = dict(part.split("=", 1) for part in shlex.split(environment))
    [volume] = of(last, "VOLUME")
    assert all(kept[name].startswith(volume) for name in ("HETEROLLM_CACHE", "HF_HOME", "HOME"))


def test_the_container_serves_where_it_says():
    text = DOCKERFILE.read_text("utf-8")
    last = stages(text)[-1]
    [words] = map(json.loads, of(last, "CMD"))
    given = parse(words)
    [port] = of(last, "EXPOSE")
    assert int(port) == given["port"] == default_port()
    assert given["host"] == "0.0.0.0"
    assert f":{port}/health" in of(last, "HEALTHCHECK")[0]
    for line in re.findall(r"^#     docker run .* heterollm (serve .*)$", text, re.MULTILINE):
        parse(shlex.split(line))


def docker(*arguments, **options):
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=1800, **options)


def has_docker():
    return shutil.which("docker") is not None and docker("info").returncode == 0


@pytest.mark.slow
def test_the_container_is_built_and_healthy():
    if not has_docker():
        pytest.skip("no Docker engine answers")
    image = "heterollm-test"
    built = docker("build", "-q", "-f", str(DOCKERFILE), "-t", image, str(ROOT))
    assert built.returncode == 0, built.stderr
    started = docker("run", "-d", "--rm", "--health-interval=2s", image)
    name = started.stdout.strip()
    try:
        for _ in range(120):
            state = docker("inspect", "-f", "{{.State.Health.Status}}", name).stdout.strip()
            if state != "starting":
                break
            time.sleep(1)
        assert state == "healthy", docker("logs", name).stderr
        assert docker("exec", name, "id", "-u").stdout.strip() == "10001"
    finally:
        docker("kill", name)


# -- the service -------------------------------------------------------------------------------------


def settings(text):
    """Return the values of a unit by name, in their order."""
    found = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_service_runs_what_the_program_takes():
    unit = settings(SERVICE.read_text("utf-8"))
    given = settings(ENVIRONMENT.read_text("utf-8"))
    [command] = unit["ExecStart"]
    for name, (value,) in given.items():
        command = command.replace(f"${name}", value)
    assert "$" not in command
    program, *words = command.split()
    assert program == INSTALLED
    found = parse(words)
    assert (found["host"], found["port"]) == ("127.0.0.1", default_port())
    assert unit["EnvironmentFile"] == ["/etc/heterollm/environment"]
    [folder] = unit["CacheDirectory"]
    kept = dict(part.split("=") for part in unit["Environment"][0].split())
    assert all(
        kept[name].startswith(f"/var/cache/{folder}") for name in ("HETEROLLM_CACHE", "HF_HOME", "HOME")
    )


def test_the_service_may_do_no_more_than_it_needs():
    unit = settings(SERVICE.read_text("utf-8"))
    for name in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictNamespaces"):
        assert unit[name] == ["yes"], name
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["DevicePolicy"] == ["closed"]
    # They would end the program: kernels are compiled into memory, and /proc/meminfo is read.
    assert not {"MemoryDenyWriteExecute", "ProcSubset", "PrivateDevices"} & set(unit)


def test_systemd_takes_the_service(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze")
    unit = tmp_path / SERVICE.name
    # It looks for the program, which is not installed there.
    unit.write_text(SERVICE.read_text("utf-8").replace(INSTALLED, sys.executable), "utf-8")
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    rated = subprocess.run(
        [analyze, "security", "--offline=true", "--no-pager", unit],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "offline" in rated.stderr:
        pytest.skip("a systemd before 250 rates no files")
    exposure = re.search(r"Overall exposure level for [\w.]+: ([\d.]+)", rated.stdout)
    assert exposure, rated.stderr
    assert float(exposure[1]) <= 2.5
