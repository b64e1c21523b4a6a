"""Translate settings of other programs: the flags and YAML of `ac_training`, and PI0-RIPT's YAML.

A name that is not in migrate_names or migrate_ript is refused with the nearest known one: a setting that is dropped
silently is worse than an error. So is a name in a section where it means nothing, or something else. All names that are
refused are reported at once.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from pistar.config.migrate_names import (
    ACRLPD,
    ACRLPD_FLAGS,
    FLAGS_LEFT_OUT,
    NONE,
    OLD_PRESETS,
    WITHOUT_VALUE,
    Names,
    Rule,
)
from pistar.config.migrate_ript import RIPT, RIPT_LEFT_OUT, TASKS
from pistar.errors import UserError

Table = Mapping[str, Any]
Sections = Mapping[str, Names]

OUR_GROUPS = {"algorithm", "online", "policy_optimizer"}
"""Tables of ours that no other program has."""
LAST = (*TASKS, "scheduler", "advanced", "use_ema")
"""Names that are applied after the others, whatever their order in the file: a task's number after its suite."""
PRESETS_BY_PLACE = {
    **{f"libero/{suite}": f"ript_libero_{suite}" for suite in ("goal", "spatial", "object", "90")},
    "libero/10": "ript_libero_long",
    "aloha/transfer-cube": "ript_aloha_sim",
}
"""Environments of PI0-RIPT's files → presets."""


def _marks(sections: Sections, *ambiguous: str) -> set[str]:
    """Names at the top of a file that say whose it is: tables, and settings with another name here."""
    settings = {name for name, rule in sections[""].items() if rule.ours != name}
    return (settings | set(sections)) - {"", "name", *ambiguous}


_MARKS_OF_RIPT = _marks(RIPT, "model", "num_train_steps", "log_every") | set(RIPT_LEFT_OUT)
_MARKS_OF_ACRLPD = _marks(ACRLPD, "model", "data", "critic_optimizer")
_MARKS_OF_THEIR_MODEL = set(RIPT["model"]) - {"action_dim", "action_horizon", "dtype"}


def as_ours(table: Table) -> tuple[dict[str, Any], list[str]]:
    """A YAML table under our names, and a note on every name that changed or has no counterpart."""
    whose = _whose(table)
    if whose == "ours":
        return dict(table), []
    return _Translation(ACRLPD, {}).run(table) if whose == "acrlpd" else _Translation(RIPT, RIPT_LEFT_OUT).run(table)


def _whose(table: Table) -> Literal["ours", "acrlpd", "ript"]:
    """Which program's names a file has: those most of its names are of."""
    names, model = set(table), table.get("model")
    ript, acrlpd = len(names & _MARKS_OF_RIPT), len(names & _MARKS_OF_ACRLPD)
    if isinstance(model, Mapping) and set(model) & _MARKS_OF_THEIR_MODEL:
        ript += 1
    if names & OUR_GROUPS or not (ript or acrlpd):
        return "ours"
    return "acrlpd" if acrlpd > ript else "ript"


def preset_of_file(path: Path, presets: Sequence[str]) -> str | None:
    """The preset that a file of settings belongs to, if its environment, a name in it or its own name says so."""
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    if not isinstance(table, Mapping):
        return None
    whose, stem = _whose(table), path.stem
    try:
        environment = str(_get(as_ours(table)[0], "online.environment"))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    place = PRESETS_BY_PLACE.get("/".join(environment.split("/")[:2]), f"ript_{environment.partition('/')[0]}")
    meant = {
        "ours": [str(table.get("name")), *([f"ript_{stem}"] if "online" in table else []), stem],
        "ript": [place, f"ript_{stem}", stem],
        "acrlpd": [OLD_PRESETS.get(stem, stem), f"rl_{stem}"],
    }
    return next((name for name in meant[whose] if name in presets), None)


@dataclasses.dataclass
class _Translation:
    """A file on its way to our names."""

    sections: Sections
    left_out: Mapping[str, str]
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    giving_way: list[tuple[Rule, str, object, object]] = dataclasses.field(default_factory=list)
    needed: list[tuple[str, object, str]] = dataclasses.field(default_factory=list)

    def run(self, table: Table) -> tuple[dict[str, Any], list[str]]:
        """Translate a whole file; an error names everything that is wrong with it."""
        for name, value in _in_order(table):
            if name in self.left_out:
                self.notes.append(f"{name} is left out: {self.left_out[name]}.")
            elif name in self.sections and (value is None or isinstance(value, Mapping)):
                self._section(value or {}, name, f"{name}.")
            else:
                self._apply("", name, name, value)
        for rule, full, value, changed in self.giving_way:
            if rule.ours is not None and _get(self.ours, rule.ours) is not None:
                self.notes.append(f"{full} is left out: another name in the file sets {rule.ours}.")
            else:
                self._set(rule, full, value, changed)
        for dotted, needed, because in self.needed:
            if _get(self.ours, dotted) is None:
                _put(self.ours, dotted, needed)
                self.notes.append(f"{dotted} is {'none' if needed is None else needed}, because of {because}.")
        if self.errors:
            raise UserError(" ".join(self.errors))
        return self.ours, self.notes

    def _section(self, table: Table, section: str, prefix: str) -> None:
        for name, value in _in_order(table):
            if name in self.sections and isinstance(value, Mapping):  # training.optimizer
                self._section(value, name, f"{prefix}{name}.")
            else:
                self._apply(section, name, prefix + name, value)

    def _apply(self, section: str, name: str, full: str, value: object) -> None:
        rule = self.sections[section].get(name)
        if rule is None:
            tables = () if section else (*self.sections, *self.left_out)
            self.errors.append(f"{full} is an unknown setting; {_hint(section, name, self.sections, tables)}")
            return
        try:
            changed = rule.change(value)
        except UserError as error:
            self.errors.append(f"{full}: {error}")
            return
        except (TypeError, ValueError, AttributeError):
            self.errors.append(f"{full} is {value!r}, which is no value for it; see docs/how-to/migrate.md.")
            return
        if rule.ours is None:
            self.notes.append(f"{full} is left out: {rule.why}.")
        elif changed is None:
            if value is not None:
                self.notes.append(f"{full} {value} does not change {rule.ours}{_remark(rule)}.")
        elif rule.gives_way:
            self.giving_way.append((rule, full, value, changed))
        else:
            self._set(rule, full, value, changed)

    def _set(self, rule: Rule, full: str, value: object, changed: object) -> None:
        assert rule.ours is not None
        new = None if changed is NONE else changed
        before = _get(self.ours, rule.ours)
        if before is not None and not isinstance(new, dict | list) and before != new:
            self.errors.append(
                f"{full} sets {rule.ours} to {_word(new)}, and another name in the file sets it to {before}; leave one "
                "out."
            )
            return
        _put(self.ours, rule.ours, new)
        renamed = f", as {_word(new)}" if new is None or (isinstance(new, str) and new != value) else ""
        moved = "." in rule.ours and "." not in full  # from the top into a table
        if renamed or moved or rule.why or rule.ours.rpartition(".")[2] != full.rpartition(".")[2]:
            self.notes.append(f"{full} is {rule.ours} here{renamed}{_remark(rule)}.")
        self.needed += [(dotted, needed, full) for dotted, needed in rule.also.items()]


def _in_order(table: Table) -> list[tuple[str, Any]]:
    return sorted(((str(name), value) for name, value in table.items()), key=lambda item: item[0] in LAST)


def _remark(rule: Rule) -> str:
    return f" ({rule.why})" if rule.why else ""


def _word(value: object) -> str:
    return "none" if value is None else str(value)


def _hint(section: str, name: str, sections: Sections, more: Sequence[str]) -> str:
    """Where the name belongs, or the nearest name: in its own section, else in any."""
    homes = [f"{home}.{name}" if home else f"{name} at the top" for home, names in sections.items() if name in names]
    if homes:
        return f"did you mean {' or '.join(homes)}?"
    near = difflib.get_close_matches(name, [*sections[section], *more], n=1)
    if near:
        return f"did you mean {near[0]}?"
    everywhere = {known: f"{home}.{known}" if home else known for home, names in sections.items() for known in names}
    near = difflib.get_close_matches(name, everywhere, n=1)
    return f"did you mean {everywhere[near[0]]}?" if near else "see docs/how-to/migrate.md for the known names."


def _get(table: Table, dotted: str) -> object:
    """The value of a dotted name; None if there is none yet."""
    found: object = table
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _put(table: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    before = table.get(last)
    if isinstance(value, dict) and set(value) == {"/"}:  # a part of a path: of an environment, its task
        table[last] = f"{before or 'libero'}/{value['/']}"
    elif isinstance(value, dict) and isinstance(before, dict):
        table[last] = {**before, **value}
    elif isinstance(value, list) and isinstance(before, list):
        table[last] = [*before, *(item for item in value if item not in before)]
    else:
        table[last] = value


def flags_as_ours(args: Sequence[str], presets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of `pistar train` with the flags of other programs translated, and a note on each.

    Flags of train_acrlpd_pi0.py and train_acrlpd_v2.py are the settings at the top of their files.
    """
    ours: list[str] = []
    notes: list[str] = []
    errors: list[str] = []
    given = list(args)
    if given and given[0] in OLD_PRESETS:
        notes.append(f"{given[0]} is {OLD_PRESETS[given[0]]} here.")
        given[0] = OLD_PRESETS[given[0]]
    while given:
        flag, equals, value = given.pop(0).partition("=")
        if flag == "--config":
            value = value if equals else given.pop(0) if given else ""
            preset = OLD_PRESETS.get(value, value)
            if preset in presets:
                ours.insert(0, preset)
                notes.append(f"--config {value} is `pistar train {preset}` here; --config is for YAML files.")
            else:
                errors += _check_file(value, presets)
                ours += ["--config", value]
            continue
        name = flag.removeprefix("--")
        rule = ACRLPD[""].get(name) if flag.startswith("--") and name != "name" else None  # --name is ours, too
        if (rule is None or rule.ours == name) and flag not in (*ACRLPD_FLAGS, *FLAGS_LEFT_OUT):
            ours.append(flag + equals + value)
            continue
        if not equals and flag not in WITHOUT_VALUE and given and not given[0].startswith("--"):
            value = given.pop(0)
        if flag in FLAGS_LEFT_OUT:
            notes.append(f"{flag} is left out: {FLAGS_LEFT_OUT[flag]}.")
        elif flag in ACRLPD_FLAGS:
            ours.append(ACRLPD_FLAGS[flag])
            notes.append(f"{flag} is {ACRLPD_FLAGS[flag]} here.")
        elif rule is not None:
            _apply_flag(flag, value, rule, ours, notes, errors)
    if errors:
        raise UserError(" ".join(errors))
    if "--config" in ours and ours[0].startswith("-") and not {"--help", "-h", *presets} & set(ours):
        path = ours[ours.index("--config") + 1]
        if found := preset_of_file(Path(path), presets):
            ours.insert(0, found)
            notes.append(f"{path} is read as a run of the preset {found}.")
    return ours, notes


def _apply_flag(flag: str, value: str, rule: Rule, ours: list[str], notes: list[str], errors: list[str]) -> None:
    """Append what a flag of theirs becomes."""
    try:
        given = yaml.safe_load(value) if value.startswith("[") else value
        changed = rule.change({"": True, "true": True, "false": False}.get(value.lower(), given))
    except UserError as error:
        errors.append(f"{flag}: {error}")
        return
    except (TypeError, ValueError, AttributeError, yaml.YAMLError):
        errors.append(f"{flag} is {value!r}, which is no value for it; see docs/how-to/migrate.md.")
        return
    if rule.ours is None:
        notes.append(f"{flag} is left out: {rule.why}.")
        return
    option = f"--{rule.ours.replace('_', '-')}"
    if changed is None:
        notes.append(f"{flag} does not change {option}{_remark(rule)}.")
        return
    parts = (
        {f"{option}.{part.replace('_', '-')}": new for part, new in changed.items()}
        if isinstance(changed, dict)
        else {option: changed}
    )
    for part, new in parts.items():
        ours += [part, *_words(new)]
    notes.append(f"{flag} is {' and '.join(parts)} here{_remark(rule)}.")


def _words(value: object) -> list[str]:
    """A value as words of a command line; none for a flag that was given without one."""
    if value is True:
        return []
    if value is NONE:
        return ["none"]
    if isinstance(value, list):
        return [str(item) for item in value]
    return [f"{value:g}" if isinstance(value, float) else str(value)]


def _check_file(name: str, presets: Sequence[str]) -> list[str]:
    """What is wrong with a value of --config that is neither a file nor a preset; nothing if it is a file."""
    if Path(name).suffix in (".yaml", ".yml") or Path(name).is_file():
        return []  # reading it says whether it can be read
    if not name or name.startswith("--"):
        return ["--config is given without a file; name one after it: --config FILE.yaml."]
    near = difflib.get_close_matches(name, presets, n=1)
    remedy = f"did you mean {near[0]}?" if near else "`pistar presets` lists them."
    return [f"--config is {name!r}, which is neither a YAML file nor a preset; {remedy}"]
