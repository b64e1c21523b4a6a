"""The project's rules that a machine can check besides lint and types: one-way imports, short files, the lock."""

import ast
import re
from pathlib import Path

import pytest

from helpers.paths import ROOT
from layers import allowed_imports

SOURCE = ROOT / "src" / "pistar"


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
    return imported_rooms(source) - allowed_imports(here) - {here}


FILES = sorted({*SOURCE.rglob("*.py")} - {SOURCE / "__init__.py"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    assert turned_arrows(room(path), path.read_text()) == set()


@pytest.mark.parametrize(
    "line",
    ["from pistar.training.setup import Run", "import pistar.training.setup", "from pistar import training"],
)
def test_a_turned_arrow_is_seen(line: str) -> None:
    assert turned_arrows("models", f"def f():\n    {line}\n") == {"training"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_is_short_or_says_why_not(path: Path) -> None:
    source = path.read_text()
    reason = re.search(r"[Ll]ong(er)?\b.*\bbecause\b", ast.get_docstring(ast.parse(source)) or "", flags=re.DOTALL)
    assert len(source.splitlines()) <= 400 or reason


def test_no_room_has_more_than_fifteen_files_at_one_level() -> None:
    folders = {path.parent for path in FILES}
    counts = {folder: len([path for path in folder.glob("*.py") if path.stem != "__init__"]) for folder in folders}
    assert {str(folder.relative_to(SOURCE)): count for folder, count in counts.items() if count > 15} == {}


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
