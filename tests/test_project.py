"""The house rules that a machine can check: lint, types, one-way imports, no lost addresses."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "pistar"

MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "tables": {"errors"},
    "config": {"errors"},
    "presets": {"config", "training", "errors"},
    "models": {"types", "config", "errors"},
    "agents": {"models", "types", "config", "errors"},
    "data": {"types", "config", "errors"},
    "report": {"types"},
    "envs": {"types", "errors"},
    "training": {"agents", "models", "data", "envs", "types", "config", "tables", "errors"},
    "demo": {"training", "envs", "data", "presets", "config", "report", "errors"},
    "cli_runs": {"training", "data", "presets", "report", "config", "errors"},
    "cli_checkpoints": {"training", "models", "errors"},
    "cli_envs": {"training", "envs", "data", "report", "config", "errors"},
    "cli": {
        "cli_runs",
        "cli_envs",
        "cli_checkpoints",
        "demo",
        "training",
        "data",
        "presets",
        "report",
        "config",
        "errors",
    },
}
"""Every room, and the rooms it may look into besides itself."""


def room(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" if node.module == "pistar" else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("pistar.")}
    return rooms


def turned_arrows(here: str, source: str) -> set[str]:
    return imported_rooms(source) - MAY_IMPORT.get(here, set()) - {here}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    assert turned_arrows(room(path), path.read_text()) == set()


@pytest.mark.parametrize(
    "line",
    ["from pistar.training.policy import Policy", "import pistar.training.policy", "from pistar import training"],
)
def test_a_turned_arrow_is_seen(line: str) -> None:
    assert turned_arrows("models", f"def f():\n    {line}\n") == {"training"}


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join)
def test_lint_and_types_are_clean(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_models_know_openpis_parameter_names() -> None:
    strangers = [
        str(path.relative_to(ROOT))
        for path in SOURCE.rglob("*.py")
        if room(path) != "models" and re.search(r"\bPaliGemma/|q_einsum|_proj/", path.read_text())
    ]
    assert strangers == []


def test_the_lock_pins_every_package_and_names_no_address() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9._-]+==[^ /]+( ; .*)?", line)] == []


def test_tests_that_the_docs_name_are_there() -> None:
    named = {
        (path, name)
        for page in (ROOT / "docs").glob("*.md")
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    }
    assert named
    assert [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()] == []
