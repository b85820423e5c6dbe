"""Unpacks Debian's packages of another release or processor into a folder; nothing is installed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def unpack(folder: Path, architecture: str, root: Path, packages: Sequence[str]) -> None:
    """Unpack packages of Debian trixie with all that they depend on, by an apt that knows of no others.

    Args:
        folder: Where apt keeps its files.
        architecture: Debian's name of the processor.
        root: Folder that takes the files of the packages.
        packages: Their names.
    """
    apt = folder / f"apt-{architecture}"
    for name in ("state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "etc/trusted.gpg.d").mkdir(exist_ok=True)
    (apt / "state/status").touch()
    own = [Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources")]
    lines = "\n".join(path.read_text() for path in own if path.exists()).splitlines()
    # A comment may name another archive, which need not be in reach.
    text = "\n".join(line for line in lines if not line.startswith("#"))
    mirror = (
        found.group()
        if (found := re.search(r"https?://\S*/debian\b", text))
        else "http://deb.debian.org/debian"
    )
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "etc/sources.list").write_text(
        f"deb [arch={architecture} signed-by={keys}] {mirror} trixie main\n"
    )
    settings = {
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "state/status",
        "Dir::Cache": apt / "cache",
        "Dir::Etc": apt / "etc",
        "Dir::Etc::sourceparts": "/dev/null",
        "APT::Architecture": architecture,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
    }
    lines = [f'{name} "{value}";' for name, value in settings.items()]
    (apt / "apt.conf").write_text("\n".join([*lines, f'APT::Architectures {{"{architecture}";}};']))
    environment = os.environ | {"APT_CONFIG": str(apt / "apt.conf")}
    _run(["apt-get", "-qq", "update"], env=environment)
    command = ["apt-get", "-qq", "-y", "--download-only", "install", *packages]
    _run(command, env=environment)
    for name in ("lib", "bin", "sbin", "lib64"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    (root / "w").mkdir(exist_ok=True)
    for package in (apt / "cache/archives").glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(root)])


def _run(command: Sequence[str], **options: Any) -> None:  # noqa: ANN401 - those of subprocess
    subprocess.run(list(command), check=True, text=True, **options)  # noqa: S603 - commands of this file
