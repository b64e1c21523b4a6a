"""The parts of the documentation that are made from the code: commands, settings, presets and modules, as Markdown."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import yaml

from pistar.cli.main import COMMANDS, main
from pistar.config import migrate_names, migrate_own, migrate_ript
from pistar.config.model_presets import MODELS, model_name
from pistar.config.presets import PRESETS
from pistar.tables import to_table
from pistar.telemetry import metric_names

from layers import LAYERS, ROOMS

PACKAGE = Path(__file__).parents[1] / "src" / "pistar"
WIDTH = 88
"""Columns of a captured help text: what fits beside the table of contents."""
RUN: type[Any] = type(next(iter(PRESETS.values())))
"""The dataclass of a whole run."""


def _cell(text: str) -> str:
    """Text that can stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose first column is names, which stylesheets/extra.css keeps on one line."""
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
    return f'<div class="names" markdown>\n\n{table}\n\n</div>\n'


# Commands


def help_text(*args: str) -> str:
    """What a command prints when it is asked for help."""
    printed = io.StringIO()
    wide = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    with mock.patch.dict(os.environ, wide), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*args, "--help"])
    return printed.getvalue().rstrip()


def commands() -> str:
    """Every command with its help."""
    return "\n".join(f"## pistar {name}\n\n```text\n{help_text(*name.split())}\n```\n" for name in COMMANDS)


# Settings


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                docs[field.target.id] = inspect.cleandoc(str(after.value.value)) if told else ""  # type: ignore[attr-defined]
    return docs


def _alternatives(hint: Any) -> list[Any]:  # noqa: ANN401  # a type, of any sort
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return list(typing.get_args(hint)) if union else [hint]


def _dataclasses(hint: Any) -> list[type[Any]]:  # noqa: ANN401  # a type, of any sort
    return [kind for kind in _alternatives(hint) if isinstance(kind, type) and dataclasses.is_dataclass(kind)]


def type_text(hint: Any) -> str:  # noqa: ANN401  # a type, of any sort
    """A type as a user of YAML and of the command line would call it."""
    kinds = _alternatives(hint)
    if len(kinds) > 1:
        return " or ".join(type_text(kind) for kind in kinds)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "none"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is tuple and inner[-1] is Ellipsis:
        return f"list of {type_text(inner[0])}"
    if origin is tuple:
        return f"[{', '.join(map(type_text, inner))}]"
    if origin in (dict, Mapping):
        return f"table of {type_text(inner[1])}"
    return {Path: "path", str: "text"}.get(hint, getattr(hint, "__name__", str(hint)))


def default_text(value: object) -> str:
    """A value as YAML has it, on one line."""
    if value is dataclasses.MISSING:
        return "–"
    flow = yaml.safe_dump(to_table(value), default_flow_style=True, allow_unicode=True, width=10_000)
    return f"`{flow.removesuffix(chr(10)).removesuffix('...').strip()}`".replace("`null`", "none")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of the run's settings that holds a value."""

    name: str
    """Its dotted name, as YAML and the command line have it."""
    type: str
    default: str
    doc: str


@dataclasses.dataclass(frozen=True)
class Group:
    """A dataclass among the settings of a run."""

    name: str
    """Its dotted name; empty for the run itself."""
    cls: type[Any]
    choices: tuple[type[Any], ...]
    """The dataclasses that may stand here; more than one where YAML has to say which by `type`."""
    optional: bool
    settings: tuple[Setting, ...]

    @property
    def title(self) -> str:
        """Heading of the group."""
        chosen = f" (type: {self.cls.__name__})" if len(self.choices) > 1 else ""
        return f"{self.name or 'The run'}{chosen}"


def _default(field: "dataclasses.Field[Any]") -> object:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def groups(
    cls: type[Any] = RUN, name: str = "", choices: tuple[type[Any], ...] = (), optional: bool = False
) -> Iterator[Group]:
    """The dataclass and all those below it, each with the settings it holds itself."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    settings, below = [], []
    for field in dataclasses.fields(cls):
        full = f"{name}.{field.name}".lstrip(".")
        kinds, default = _dataclasses(hints[field.name]), _default(field)
        if kinds:
            kinds.sort(key=lambda kind: not isinstance(default, kind))  # the default's first
            below += [(kind, full, tuple(kinds), type(None) in _alternatives(hints[field.name])) for kind in kinds]
        else:
            told = docs.get(field.name, "")
            settings.append(Setting(full, type_text(hints[field.name]), default_text(default), told))
    yield Group(name, cls, choices or (cls,), optional, tuple(settings))
    for entry in below:
        yield from groups(*entry)


@functools.cache
def all_groups() -> tuple[Group, ...]:
    """The dataclasses among the settings of a run, the run's own first."""
    return tuple(groups())


def command_line_options() -> set[str]:
    """Dotted names of the settings that `pistar train` takes as options, with any preset."""
    shapes: dict[tuple[str, ...], str] = {}  # presets whose settings are of the same dataclasses have the same options
    for preset, run in PRESETS.items():
        parts = [type(getattr(run, field.name)).__name__ for field in dataclasses.fields(run)]
        shapes.setdefault(tuple(parts), preset)
    found: set[str] = set()
    for preset in shapes.values():
        found |= set(re.findall(r"(?<![\w-])--([\w.-]+)", help_text("train", preset)))
    return {option.replace("-", "_") for option in found}


def settings() -> str:
    """Every setting of a run, group by group."""
    options = command_line_options()
    parts: list[str] = []
    documented: dict[tuple[str, type[Any]], str] = {}  # by the last word of the name: where a group was told first
    for group in all_groups():
        level = "##" if group.name.count(".") == 0 else "###"
        last = group.name.rpartition(".")[2]
        told = documented.get((last, group.cls))
        if told is not None and group.cls is not group.choices[0]:
            continue  # an alternative that is told elsewhere under the same name, see below
        documented.setdefault((last, group.cls), group.name)
        parts.append(f"{level} {group.title}\n\n{inspect.cleandoc(group.cls.__doc__ or '')}\n")
        if group.optional:
            parts.append("May be none.\n")
        if len(group.choices) > 1 and group.cls is group.choices[0]:
            others = group.choices[1:]
            names = ", ".join(f"`{kind.__name__}`" for kind in others)
            where = documented.get((last, others[0]))
            where = f" Their settings are under `{where}`." if where not in (None, group.name) else ""
            parts.append(f"In YAML `{group.name}.type` may also be {names}.{where}\n")
        rows = [
            (
                f"`{setting.name}`" + ("" if setting.name in options else " <small>YAML only</small>"),
                setting.type,
                setting.default,
                setting.doc,
            )
            for setting in group.settings
        ]
        if rows:
            parts.append(_table(("Setting", "Type", "Default", "What it is"), rows))
    return "\n".join(parts)


# Presets


def _differences(value: Any) -> Any:  # noqa: ANN401  # a table, or a plain value
    """A dataclass as a table, without the fields that are as its own defaults have them."""
    table = {}
    for field in dataclasses.fields(value):
        mine, usual = getattr(value, field.name), _default(field)
        if mine == usual:
            continue
        if dataclasses.is_dataclass(mine):
            hint = typing.get_type_hints(type(value))[field.name]
            inner = _differences(mine)
            if len(_dataclasses(hint)) > 1:
                inner = {"type": type(mine).__name__} | inner
            table[field.name] = inner
        else:
            table[field.name] = to_table(mine)
    return table


def _algorithm(run: Any) -> str:  # noqa: ANN401  # the run's dataclass
    name: str = run.algorithm.name
    return name.upper()


def _simulator(run: Any) -> str | None:  # noqa: ANN401  # the run's dataclass
    return getattr(run.online, "environment", None)


def families() -> str:
    """Presets by algorithm and by what they learn from."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, run in PRESETS.items():
        source = "rollouts in a simulator" if _simulator(run) else "datasets"
        found.setdefault((_algorithm(run), source), []).append(f"`{name}`")
    return _table(("Algorithm", "Learns from", "Presets"), [(*kind, ", ".join(names)) for kind, names in found.items()])


def presets() -> str:
    """The table of presets, and what each of them sets."""
    rows = [
        (
            f"`{name}`",
            _algorithm(run),
            run.robot,
            f"`{model_name(run.model)}`",
            str(run.model.action_horizon),
            f"`{_simulator(run)}`".replace(",", "`, `") if _simulator(run) else "",
            str(run.batch_size),
            str(run.steps),
        )
        for name, run in PRESETS.items()
    ]
    head = ("Preset", "Algorithm", "Robot", "Model", "Chunk", "Simulator", "Batch", "Steps")
    parts = [
        _table(head, rows),
        "## What each preset sets\n",
        "Everything in which a preset differs from the defaults of the [settings](settings.md), as YAML. "
        "The model is in the table above.\n",
    ]
    for name, run in PRESETS.items():
        table = {key: value for key, value in _differences(run).items() if key not in ("name", "model")}
        text = yaml.safe_dump(table, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)
        parts.append(f'??? note "{name}"\n\n' + textwrap.indent(f"```yaml\n{text.rstrip()}\n```", "    ") + "\n")
    return "\n".join(parts)


def models() -> str:
    """The table of model sizes."""
    rows = []
    for name, model in MODELS.items():
        experts = [
            f"{part.width} × {part.depth}" + (f", LoRA rank {part.lora.rank}" if part.lora else "")
            for part in (model.vlm, model.expert)
        ]
        vision = f"{model.vision.width} × {model.vision.depth}"
        chunk = f"{model.action_horizon} × {model.action_dim}"
        rows.append((f"`{name}`", *experts, vision, str(model.image_size), chunk))
    head = ("Model", "Language model, width × depth", "Action expert", "Vision", "Pixels", "Actions")
    return _table(head, rows)


# Modules


def modules() -> list[Path]:
    """Every module of the package, relative to it."""
    found = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    return sorted(path for path in found if path.name != "__init__.py")


def first_line(module: Path) -> str:
    """The first sentence or line of a module's docstring."""
    told = ast.get_docstring(ast.parse((PACKAGE / module).read_text(encoding="utf-8"))) or ""
    return told.split("\n\n")[0]


def module_tree() -> str:
    """Every module with what it says of itself, room by room, from the top layer down."""
    parts = []
    for room in [room for rooms in reversed(LAYERS) for room in rooms]:
        mine = [path for path in modules() if path.parts[0].removesuffix(".py") == room]
        if not mine:
            continue
        alone = mine[0].parts == (f"{room}.py",)
        title = f"{room}.py" if alone else f"{room}/"
        rows = [(f"`{path}`", first_line(path)) for path in mine]
        parts.append(f"### {title}\n\n{ROOMS[room]}\n\n{_table(('Module', 'What it is'), rows)}")
    return "\n".join(parts)


def layer_table() -> str:
    """The layers of imports that exist, top layer first."""
    there = {path.parts[0].removesuffix(".py") for path in modules()}
    rows = []
    for rooms in reversed(LAYERS):
        here = [room for room in rooms if room in there]
        if here:
            rows.append((", ".join(f"`{room}`" for room in here), " ".join(ROOMS[room] for room in here)))
    return _table(("Rooms", "What they are for"), rows)


# Renamed


def renamed_settings() -> str:
    """Settings of older versions, and those that are gone."""
    renamed = _table(("Before", "Now"), ((f"`{old}`", f"`{new}`") for old, new in migrate_own.RENAMED.items()))
    gone = ((f"`{name}`", instead) for name, (_, instead) in migrate_own.GONE.items())
    return f"{renamed}\nThese are no settings any more:\n\n{_table(('Before', 'Instead'), gone)}"


def renamed_metrics() -> str:
    """Metrics of older versions."""
    names = {**metric_names.RENAMED, **{old: metric_names.new_name(old) for old in metric_names.EVALUATIONS}}
    return _table(("Before", "Now"), ((f"`{old}`", f"`{new}`") for old, new in names.items()))


# Other programs


def _migrated(sections: Mapping[str, migrate_names.Names], left_out: Mapping[str, str]) -> str:
    """Every name of another program's files: table by table, what it is here."""
    head = ("There", "Here", "Remark")
    titles: dict[str, migrate_names.Names] = {}
    for names in sections.values():
        homes = [section for section, its_names in sections.items() if its_names == names]
        titles[", ".join(f"`{home}`" if home else "the top of the file" for home in homes)] = names
    parts = []
    for title, names in titles.items():
        rows = [(f"`{name}`", f"`{rule.ours}`" if rule.ours else "–", rule.why) for name, rule in names.items()]
        parts.append(f"{title}:\n\n{_table(head, rows)}")
    ignored = [(f"`{name}`", "–", why) for name, why in left_out.items()]
    return "\n".join([*parts, f"Tables that are ignored:\n\n{_table(head, ignored)}"] if ignored else parts)


def migrated_acrlpd() -> str:
    """Every setting of ac_training; what its tables share is shown once."""
    top = migrate_names.ACRLPD[""]
    own = {
        section: {name: rule for name, rule in names.items() if names is top or top.get(name) is not rule}
        for section, names in migrate_names.ACRLPD.items()
    }
    return _migrated(own, {})


def migrated_ript() -> str:
    """Every setting of PI0-RIPT."""
    return _migrated(migrate_ript.RIPT, migrate_ript.RIPT_LEFT_OUT)


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "settings": settings,
    "families": families,
    "presets": presets,
    "models": models,
    "modules": module_tree,
    "layers": layer_table,
    "renamed_settings": renamed_settings,
    "renamed_metrics": renamed_metrics,
    "migrated_acrlpd": migrated_acrlpd,
    "migrated_ript": migrated_ript,
}
"""What `<!-- generated: NAME -->` on a page is replaced by."""


def fill(markdown: str) -> str:
    """A page with its generated parts in place."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: PARTS[found[1]](), markdown)
