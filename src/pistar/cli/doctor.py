"""`pistar doctor`: what this machine has, and the command to get what is missing."""

import collections
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from pathlib import Path

from rich.text import Text

import pistar
from pistar.cli.printing import make_table
from pistar.cli.printing import out as standard_output
from pistar.errors import UserError

_PLUGINS = {"jax[cuda12]": "jax-cuda12-plugin"}
"""What an extra of another package installs."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """One thing that was looked for."""

    name: str
    found: str
    remedy: str = ""
    """The command to get it, if it is missing."""


def doctor() -> None:
    """Show devices, versions, memory, renderer, tokenizer, extras and disk, and how to get what is missing."""
    table = make_table("", "what", "found", "to get it")
    for fact in [_versions(), *_devices(), _memory(), _disk(), _renderer(), _tokenizer(), *_extras()]:
        table.add_row("·" if fact.remedy else Text("✓", "green"), fact.name, Text(fact.found), Text(fact.remedy))
    standard_output().print(table)


def _versions() -> Fact:
    packages = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy"))
    return Fact(
        "versions", ", ".join([f"pistar {pistar.__version__}", f"Python {platform.python_version()}", *packages])
    )


def _devices() -> list[Fact]:
    import jax

    facts = []
    for kind, count in collections.Counter(device.device_kind for device in jax.local_devices()).items():
        first = next(device for device in jax.local_devices() if device.device_kind == kind)
        size = (first.memory_stats() or {}).get("bytes_limit")
        each = "" if size is None else f", {size / 1e9:.1f} GB of each for JAX"
        gpu = "for an NVIDIA GPU: pip install 'pistar-rl[cuda]'" if first.platform == "cpu" else ""
        facts.append(Fact("devices", f"{count} × {kind}{each}", gpu))
    return facts


def _memory() -> Fact:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return Fact("memory", f"unknown, {os.cpu_count()} cores")
    sizes = dict(line.split(":", 1) for line in lines)
    free, total = (1024 * int(sizes[name].split()[0]) / 1e9 for name in ("MemAvailable", "MemTotal"))
    return Fact("memory", f"{free:.1f} of {total:.1f} GB free, {os.cpu_count()} cores")


def _disk() -> Fact:
    return Fact("disk", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.1f} GB free in {Path.cwd()}")


def _renderer() -> Fact:
    from pistar.envs.rendering import headless

    if importlib.util.find_spec("mujoco") is None:
        return Fact("renderer", "not needed: MuJoCo is not installed")
    chosen = os.environ.get("MUJOCO_GL")
    try:
        return Fact("renderer", f"MUJOCO_GL={headless()}" + (", as set; not tried" if chosen else ", tried"))
    except UserError as error:
        reason, _, remedy = str(error).rpartition("; ")
        return Fact("renderer", reason, remedy)


def _tokenizer() -> Fact:
    from pistar.models.tokenizer import find_tokenizer

    try:
        return Fact("tokenizer", str(find_tokenizer()))
    except UserError as error:
        remedy = str(error).rpartition("; ")[2]
        return Fact("tokenizer", "PaliGemma's is missing; only the tiny models work without it", remedy)


def _extras() -> list[Fact]:
    """The extras of the package, without that for developers, and whether their packages are installed."""
    packages: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("pistar-rl") or ():
        if (match := re.match(r"([\w.\[\]-]+).*extra == ['\"]([\w-]+)", line)) and match[2] != "dev":
            packages.setdefault(match[2], []).append(_PLUGINS.get(match[1], match[1]))
    return [_extra(extra, names) for extra, names in sorted(packages.items())]


def _extra(extra: str, packages: list[str]) -> Fact:
    versions, missing = [], []
    for name in packages:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Fact(extra, f"no {', '.join(missing)}", f"pip install 'pistar-rl[{extra}]'")
    return Fact(extra, ", ".join(versions))
