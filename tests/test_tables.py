"""Dataclasses converted to tables and back."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from pistar.errors import UserError
from pistar.tables import from_table, to_table


@dataclasses.dataclass(frozen=True)
class Circle:
    radius: float = 1.0


@dataclasses.dataclass(frozen=True)
class Square:
    side: float
    corner: Literal["round", "sharp"] = "sharp"


@dataclasses.dataclass(frozen=True)
class Drawing:
    shape: Circle | Square
    size: tuple[int, int] = (3, 4)
    names: tuple[str, ...] = ()
    file: Path | None = None
    frame: Square | None = None
    inks: dict[str, int] = dataclasses.field(default_factory=dict)


DRAWING = Drawing(Square(2.0), names=("a", "b"), file=Path("x/y"), frame=Square(1.0))


@pytest.mark.parametrize("drawing", [DRAWING, Drawing(Circle()), Drawing(Circle(5.0), (1, 2), inks={"red": 3})])
def test_a_table_survives_yaml(drawing: Drawing) -> None:
    text = yaml.safe_dump(to_table(drawing))
    assert from_table(Drawing, yaml.safe_load(text), "drawing", whole=True) == drawing


def test_missing_fields_come_from_the_default() -> None:
    changed = from_table(Drawing, {"shape": {"side": 3}, "frame": {"corner": "round"}}, "drawing", default=DRAWING)
    assert changed == dataclasses.replace(DRAWING, shape=Square(3.0), frame=Square(1.0, "round"))


def test_another_dataclass_takes_its_own_defaults() -> None:
    changed = from_table(Drawing, {"shape": {"type": "Circle"}}, "drawing", default=DRAWING)
    assert changed.shape == Circle()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"shape": {"side": 1.0}}, "drawing.shape.type is None; use one of Circle, Square"),
        ({"shape": {"type": "Squre", "side": 1.0}}, "drawing.shape.type is 'Squre'"),
        ({"shape": {"type": "Square"}}, "drawing.shape.side is missing"),
        ({"shape": {"type": "Circle", "radus": 1.0}}, "drawing.shape.radus does not exist; did you mean radius"),
        ({"shape": {"type": "Circle"}, "size": [1]}, "drawing.size has 1 entries; give 2"),
        ({"shape": {"type": "Circle"}, "size": [1, "b"]}, r"drawing.size\[1\] is 'b'; its type is int"),
        ({"shape": {"type": "Circle"}, "names": "a"}, r"drawing.names is 'a'; write a list: \[a\]"),
        ({"shape": {"type": "Circle"}, "inks": {"red": "x"}}, "drawing.inks.red is 'x'; its type is int"),
        ({"shape": {"type": "Square", "side": 1, "corner": "soft"}}, "corner is 'soft'; use one of round, sharp"),
        ({"shape": {"type": "Circle", "radius": True}}, "radius is True; its type is float"),
        ({}, "drawing.shape is missing"),
        ([], r"drawing is \[\]; a table of fields belongs there"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(table: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        from_table(Drawing, table, "drawing")
    assert "\n" not in str(caught.value)


def test_a_whole_table_leaves_nothing_out() -> None:
    table = to_table(DRAWING)
    del table["size"]
    with pytest.raises(UserError, match=r"drawing\.size is missing"):
        from_table(Drawing, table, "drawing", whole=True)
