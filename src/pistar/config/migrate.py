"""Translate settings of other programs: the flags and YAML of `ac_training`, and PI0-RIPT's YAML.

A name that is not in migrate_names is refused with the nearest known one: a setting that is dropped silently is worse
than an error. So is a name in a section where it means nothing, or something else.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pistar.config.migrate_names import (
    ACRLPD,
    ACRLPD_FLAGS,
    ACRLPD_LEFT_OUT,
    RIPT,
    RIPT_LEFT_OUT,
    TASKS,
    WITHOUT_VALUE,
    Names,
    falling_rate,
)
from pistar.errors import UserError

Table = Mapping[str, Any]
Sections = Mapping[str, Names]


def as_ours(table: Table) -> tuple[dict[str, Any], list[str]]:
    """A YAML table under our names, and a note on every name that changed or has no counterpart."""
    names = set(table)
    of_ript = bool(names & {*RIPT, *RIPT_LEFT_OUT, "policy_path"} - {"model"})
    if names & {*ACRLPD} or ("num_train_steps" in names and not of_ript):
        return _translate(table, ACRLPD, ACRLPD_LEFT_OUT)
    if of_ript:
        return _translate(table, RIPT, RIPT_LEFT_OUT)
    return dict(table), []


def _translate(table: Table, sections: Sections, left_out: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    ours: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in table.items():
        if name in left_out:
            notes.append(f"{name} is left out: {left_out[name]}.")
        elif name in sections and (value is None or isinstance(value, Mapping)):
            _translate_section(value or {}, name, f"{name}.", sections, ours, notes)
        else:
            _apply("", name, name, value, sections, ours, notes, more=(*sections, *left_out))
    return ours, notes


def _translate_section(
    table: Table, section: str, prefix: str, sections: Sections, ours: dict[str, Any], notes: list[str]
) -> None:
    # A task's number after its suite, whatever their order in the file.
    for name, value in sorted(table.items(), key=lambda item: item[0] in TASKS):
        if name in sections and isinstance(value, Mapping):  # training.optimizer
            _translate_section(value, name, f"{prefix}{name}.", sections, ours, notes)
        else:
            _apply(section, name, prefix + name, value, sections, ours, notes)


def _apply(
    section: str,
    name: str,
    full: str,
    value: object,
    sections: Sections,
    ours: dict[str, Any],
    notes: list[str],
    more: Sequence[str] = (),
) -> None:
    rule = sections[section].get(name)
    if rule is None:
        raise UserError(f"{full} is an unknown setting; {_hint(section, name, sections, more)}")
    try:
        changed = rule.change(value)
    except UserError as error:
        raise UserError(f"{full}: {error}") from error
    except (TypeError, ValueError, AttributeError):
        raise UserError(f"{full} is {value!r}, which is no value for it; see docs/how-to/migrate.md.") from None
    if rule.ours is None:
        notes.append(f"{full} is left out: {rule.why}.")
        return
    if changed is None:
        return
    before = _get(ours, rule.ours)
    if before is not None and not isinstance(changed, dict | list) and before != changed:
        raise UserError(
            f"{full} sets {rule.ours} to {changed}, and another name in the file sets it to {before}; leave one out."
        )
    _put(ours, rule.ours, changed)
    renamed = f", as {changed}" if isinstance(changed, str) and changed != value else ""
    if renamed or rule.why or rule.ours.rpartition(".")[2] != name:
        notes.append(f"{full} is {rule.ours} here{renamed}{f' ({rule.why})' if rule.why else ''}.")


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
    """The arguments of `pistar train` with the flags of train_acrlpd_pi0.py translated, and a note on each."""
    ours: list[str] = []
    notes: list[str] = []
    given = list(args)
    while given:
        flag, equals, value = given.pop(0).partition("=")
        if flag == "--config":
            value = value if equals else given.pop(0) if given else ""
            if value in presets:
                ours.insert(0, value)
                notes.append(f"--config {value} is `pistar train {value}` here; --config is for YAML files.")
            else:
                _check_file(value, presets)
                ours += ["--config", value]
            continue
        if flag not in ACRLPD_FLAGS:
            ours.append(flag + equals + value)
            continue
        new = ACRLPD_FLAGS[flag]
        if not equals and flag not in WITHOUT_VALUE and given and not given[0].startswith("--"):
            value = given.pop(0)
        rule = ACRLPD[""].get(flag.removeprefix("--"))
        if new is None:
            why = (
                rule.why
                if rule
                else {"--env_name": "`pistar eval --env` evaluates a checkpoint"}.get(flag, "it has no counterpart")
            )
            notes.append(f"{flag} is left out: {why}.")
        elif new.endswith(".schedule"):
            try:
                rates = falling_rate(float(value))
            except ValueError:
                raise UserError(f"{flag} is {value!r}; a learning rate is a number (1e-5).") from None
            for name, rate in rates.items():
                ours += [f"{new}.{name.replace('_', '-')}", f"{rate:g}"]
            notes.append(f"{flag} is {new}.peak-lr here, and .decay-lr a tenth of it.")
        else:
            ours += [new, value] if value else [new]
            notes.append(f"{flag} is {new} here.")
    return ours, notes


def _check_file(name: str, presets: Sequence[str]) -> None:
    """Refuse a value of --config that is neither a file nor a preset."""
    if Path(name).suffix in (".yaml", ".yml") or Path(name).is_file():
        return  # reading it says whether it can be read
    if not name or name.startswith("--"):
        raise UserError("--config is given without a file; name one after it: --config FILE.yaml.")
    near = difflib.get_close_matches(name, presets, n=1)
    remedy = f"did you mean {near[0]}?" if near else "`pistar presets` lists them."
    raise UserError(f"--config is {name!r}, which is neither a YAML file nor a preset; {remedy}")
