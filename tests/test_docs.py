"""The documentation builds without a warning, loads nothing from the network, and names only what exists."""

import dataclasses
import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from pistar.cli.main import COMMANDS
from pistar.config.model_presets import MODELS
from pistar.config.presets import PRESETS

from check_site import problems
from docs_reference import all_groups, modules
from helpers.paths import ROOT

DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "pistar"
PAGES = sorted(DOCS.rglob("*.md"))
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built once, strictly."""
    folder = tmp_path_factory.mktemp("site").resolve()
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "WARNING" not in told, told
    return folder


def code_on(site: Path, page: str) -> set[str]:
    """What stands in code font on a page of the site."""
    text = (site / f"{page}.html").read_text(encoding="utf-8")
    return {html.unescape(found) for found in re.findall(r"<code>([^<]*)</code>", text)}


def test_no_link_is_dead_and_nothing_is_loaded_from_the_network(site: Path) -> None:
    assert list(problems(site)) == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', "loads https://unpkg.com/x.js from the network"),
        ('<link rel="stylesheet" href="//fonts.googleapis.com/css">', "loads //fonts.googleapis.com/css"),
        ("<style>@import 'https://a.b/c.css'</style>", "loads https://a.b/c.css"),
        ('<p style="background: url(http://a.b/c.png)">', "loads http://a.b/c.png"),
        ('<pre class="mermaid">graph</pre>', "a script from the network"),
        ('<a href="gone.html">', "links to gone.html, which does not exist"),
        ('<a href="#gone">', "has no such anchor"),
        ('<a href="https://example.org/#gone"> <a href="#here" id="here">', None),
    ],
)
def test_what_is_wrong_with_a_page_is_found(tmp_path: Path, page: str, problem: str | None) -> None:
    (tmp_path / "index.html").write_text(page)
    found = list(problems(tmp_path))
    assert len(found) == (problem is not None)
    assert all(problem in sentence for sentence in found if problem)


def test_every_module_is_on_the_architecture_page(site: Path) -> None:
    assert modules()
    assert {str(path) for path in modules()} - code_on(site, "reference/architecture") == set()


def test_every_module_says_what_it_is(site: Path) -> None:
    text = (site / "reference/architecture.html").read_text(encoding="utf-8")
    assert re.findall(r"<td><code>([\w/]+\.py)</code></td>\s*<td></td>", text) == []


def settings_of(value: object, name: str = "") -> Iterator[str]:
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        inner, full = getattr(value, field.name), f"{name}{field.name}"
        if dataclasses.is_dataclass(inner):
            yield from settings_of(inner, f"{full}.")
        else:
            yield full


def test_every_setting_of_every_preset_is_on_the_settings_page(site: Path) -> None:
    there = code_on(site, "reference/settings")
    tables = {group.name for group in all_groups() if group.optional}  # None in one preset, a table in another
    names = {name for run in PRESETS.values() for name in settings_of(run)}
    assert names - there - tables == set()


def test_every_command_and_preset_has_its_place(site: Path) -> None:
    commands = (site / "reference/cli.html").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f">pistar {name}<" not in commands] == []
    assert set(PRESETS) - code_on(site, "reference/presets") == set()


# What pages name


def code_in(page: Path) -> set[str]:
    """Words in code font and lines of code blocks of a page's Markdown."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return {*spans, *(line.strip() for block in blocks for line in block.splitlines())}


def named(pattern: str, pages: list[Path] = PAGES) -> list[tuple[str, str]]:
    """Pages, and what they name in code font that matches the pattern."""
    return [
        (str(page.relative_to(ROOT)), found)
        for page in pages
        for code in sorted(code_in(page))
        for found in re.findall(pattern, code)
    ]


def listed(names: list[tuple[str, str]]) -> str:
    """One line for each, so that a failure shows all of them."""
    return "\n".join(f"{page}: {name}" for page, name in names)


def test_tests_that_the_docs_name_exist() -> None:
    tests = [test.split("::") for _, test in named(r"^tests/[\w/]+\.py::\w+$")]
    assert tests
    assert [name for path, name in tests if f"def {name}(" not in (ROOT / path).read_text()] == []


def test_files_that_the_docs_name_exist() -> None:
    rooms = "|".join(path.name for path in SOURCE.iterdir() if path.is_dir())
    ours = named(rf"^((?:{rooms})/[\w/]+\.py)$")
    project = named(
        r"^((?:src|tests|benchmarks|examples|configs|tools)/[\w/]+\.(?:py|yaml))(?:::\w+)?$", PAGES + FRONT[:2]
    )
    assert ours
    assert project
    missing = [(page, path) for page, path in ours if not (SOURCE / path).exists()]
    missing += [(page, path) for page, path in project if not (ROOT / path).exists()]
    assert not missing, listed(missing)


def test_modules_that_the_docs_name_exist() -> None:
    def exists(name: str) -> bool:
        path = SOURCE.joinpath(*name.split(".")[1:])
        return path.is_dir() or path.with_suffix(".py").exists() or path.parent.with_suffix(".py").exists()

    names = named(r"(?<![\w/-])pistar(?:\.\w+)+", PAGES + FRONT[:2])
    assert names
    missing = [(page, name) for page, name in names if not exists(name)]
    assert not missing, listed(missing)


def test_settings_that_the_docs_name_exist() -> None:
    known = {setting.name for group in all_groups() for setting in group.settings}
    known |= {name for group in all_groups()[1:] for name in (group.name, f"{group.name}.type")}
    tops = "|".join(sorted({name.split(".")[0] for name in known if "." in name}))
    options = named(rf"(?<![\w.-])--(?:param )?((?:{tops})\.[\w.-]+)", PAGES + FRONT[:2])
    fields = named(rf"^((?:{tops})\.[\w.]+)(?:[: =].*)?$", PAGES + FRONT[:2])
    assert options
    assert fields

    files = (".safetensors", ".index.json")  # model.safetensors is no setting of the model

    def exists(name: str) -> bool:
        return name.endswith(files) or name.replace("-", "_").replace(".no_", ".") in known

    missing = [(page, name) for page, name in options + fields if not exists(name)]
    assert not missing, listed(missing)


def test_commands_that_the_docs_name_exist() -> None:
    names = named(r"^pistar (data [a-z]+|[a-z]+)", PAGES + FRONT[:2])
    assert names
    missing = [(page, name) for page, name in names if name not in COMMANDS]
    assert not missing, listed(missing)


def test_each_answer_to_where_a_thing_is_names_a_file_that_exists() -> None:
    page = (DOCS / "explanation" / "where-things-are.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "?" in line]
    assert len(rows) >= 10
    answers = {row: re.findall(r"`([\w/]+(?:\.py|/))`", row) for row in rows}
    assert [row for row, paths in answers.items() if not paths] == []
    assert {path for paths in answers.values() for path in paths if not (SOURCE / path).exists()} == set()


def test_the_model_snippet_of_the_first_page_runs() -> None:
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?model\.sample.*?)^```", page.partition("Use the model.")[2], re.M | re.S)

    def run() -> tuple[object, object]:
        names: dict[str, object] = {}
        exec(snippet, names)
        return names["loss"], names["chunks"]

    loss, chunks = jax.eval_shape(run)  # traced, not computed
    config = MODELS["pi0_tiny"]
    assert loss.shape == (2, config.action_horizon)
    assert chunks.shape == (2, config.action_horizon, config.action_dim)


# The pages in front


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


@pytest.mark.parametrize("page", FRONT, ids=lambda page: page.name)
def test_links_of_the_pages_in_front_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not re.match(r"https?://", link) and not (ROOT / link).exists()] == []
