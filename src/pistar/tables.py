"""Convert frozen dataclasses to plain tables, as in JSON and YAML, and back."""

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pistar.errors import UserError

T = TypeVar("T")

TYPE = "type"
"""The key that names the dataclass of a table, where a field may be one of several."""


def to_table(value: object) -> Any:  # noqa: ANN401  # tables, lists and plain values
    """Convert a dataclass to a table. Where a field may be one of several dataclasses, its table names the one."""
    if not dataclasses.is_dataclass(value):
        if isinstance(value, tuple):
            return [to_table(item) for item in value]
        return str(value) if isinstance(value, Path) else value
    table, hints = {}, typing.get_type_hints(type(value))
    for name in (field.name for field in dataclasses.fields(value)):
        inner = to_table(getattr(value, name))
        if isinstance(inner, dict) and len(_dataclasses_of(hints[name])) > 1:
            inner = {TYPE: type(getattr(value, name)).__name__} | inner
        table[name] = inner
    return table


def from_table(kind: type[T], data: object, where: str, *, default: T | None = None, whole: bool = False) -> T:
    """Convert a table to a dataclass and check the types. The error names all unknown names, each with the nearest one.

    Missing fields come from `default`, else from the dataclass's defaults; if `whole`, none may be missing. `where`:
    what errors call the table; empty if its fields are named without it.
    """
    builder = _Builder(whole)
    try:
        built: T = builder.build(kind, data, where, default)
    except UserError:
        builder.check_names()  # before what else is wrong: it may come of them
        raise
    builder.check_names()
    return built


def fits(hint: Any, data: object) -> bool:  # noqa: ANN401  # a type, of any sort
    """Whether a field of this type accepts this value of a table."""
    with contextlib.suppress(UserError):
        builder = _Builder(whole=False)
        builder.build(hint, data, "")
        builder.check_names()
        return True
    return False


def _dataclasses_of(hint: Any) -> list[Any]:  # noqa: ANN401  # a type, of any sort
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return [option for option in options if dataclasses.is_dataclass(option)]


def _joined(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


@dataclasses.dataclass(frozen=True)
class _Builder:
    whole: bool
    unknown: list[str] = dataclasses.field(default_factory=list)

    def check_names(self) -> None:
        """Refuse all unknown names at once."""
        if self.unknown:
            raise UserError(" ".join(self.unknown))

    def build(self, kind: Any, data: object, where: str, default: object = None) -> Any:  # noqa: ANN401  # as `kind`
        if dataclasses.is_dataclass(kind):
            return self._dataclass(typing.cast("type[Any]", kind), data, where, default)
        origin, options = typing.get_origin(kind), typing.get_args(kind)
        if origin in (types.UnionType, typing.Union):
            return self._union(options, data, where, default)
        if origin is tuple and isinstance(data, list):
            kinds = (options[0],) * len(data) if options[-1] is Ellipsis else options
            if len(kinds) != len(data):
                raise UserError(f"{where} has {len(data)} entries; give {len(kinds)}.")
            items = zip(kinds, data, strict=True)
            return tuple(self.build(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(items))
        if origin is dict and isinstance(data, Mapping):
            return {str(key): self.build(options[1], value, _joined(where, key)) for key, value in data.items()}
        if origin is tuple:
            raise UserError(f"{where} is {data!r}; write a list: [{data}].")
        if origin is Literal:
            if data in options:
                return data
            raise UserError(f"{where} is {data!r}; use one of {', '.join(map(str, options))}.")
        if kind is float and type(data) is int:
            return float(data)
        if kind is float and isinstance(data, str):  # YAML reads 3e-5, which has no dot, as a string
            with contextlib.suppress(ValueError):
                return float(data)
        if kind is Path and isinstance(data, str):
            return Path(data)
        if type(data) is kind:  # not isinstance: True is an int, but no dimension
            return data
        raise UserError(
            f"{where} is {data!r}; its type is {getattr(kind, '__name__', kind)}: give a value of that type."
        )

    def _union(self, options: tuple[Any, ...], data: object, where: str, default: object) -> object:
        if data is None and type(None) in options:
            return None
        kinds: list[type[Any]] = [option for option in options if option is not type(None)]
        tables = {option.__name__: option for option in kinds if dataclasses.is_dataclass(option)}
        if not tables or len(kinds) == 1:
            return self.build(kinds[0], data, where, default)
        named = data.get(TYPE) if isinstance(data, Mapping) else None
        if named is None and type(default) in tables.values():
            named = type(default).__name__
        if named not in tables:
            raise UserError(f"{_joined(where, TYPE)} is {named!r}; use one of {', '.join(tables)}.")
        rest = {key: value for key, value in data.items() if key != TYPE} if isinstance(data, Mapping) else data
        return self.build(tables[named], rest, where, default)

    def _dataclass(self, cls: type[Any], data: object, where: str, default: object) -> object:
        if not isinstance(data, Mapping):
            raise UserError(f"{where or 'it'} is {data!r}; a table of fields belongs there.")
        hints = typing.get_type_hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in data:
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(fields)}."
                self.unknown.append(f"{_joined(where, name)} does not exist; {hint}")
        base = default if type(default) is cls else None
        if base is None:
            missing = [name for name in fields if name not in data and (self.whole or _is_required(fields[name]))]
            if missing:
                raise UserError(f"{_joined(where, missing[0])} is missing; add it.")
        given = {
            name: self.build(hints[name], value, _joined(where, name), getattr(base, name, None))
            for name, value in data.items()
            if name in fields
        }
        return cls(**given) if base is None else dataclasses.replace(typing.cast("Any", base), **given)


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
