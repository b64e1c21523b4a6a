"""Tables and lines that several commands print."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import docstring_parser
from docstring_parser import DocstringStyle as Style
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pistar.evaluation.results import Trial


_WIDE = 10_000
"""Columns of an output that has no screen: more than any table needs."""


def make_table(*names: str, title: Text | None = None, show_header: bool = True) -> Table:
    """A table whose columns fold long words rather than cut them off."""
    table = Table(title=title, show_header=show_header)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


@contextlib.contextmanager
def joined_docstrings() -> Iterator[None]:
    """Join the lines of settings' docstrings for tyro, which else breaks its help where the source has a new line."""
    parse = docstring_parser.parse_from_object

    def joined(obj: Any, style: Style = Style.AUTO) -> docstring_parser.Docstring:  # noqa: ANN401  # a class
        parsed = parse(obj, style)
        for param in parsed.params:
            param.description = param.description and " ".join(param.description.split())
        return parsed

    docstring_parser.parse_from_object = joined
    try:
        yield
    finally:
        docstring_parser.parse_from_object = parse


def out() -> Console:
    """Standard output, without wrapping. In a file or a pipe, tables are as wide as their content."""
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def note(text: str, kind: str = "note") -> None:
    """Print a note, or a warning, on standard error."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"{kind}: {text}", markup=False)


def and_more(problem: str, more: int) -> str:
    """The first of several problems, in the middle of a sentence."""
    return problem.rstrip(".") + (f" (and {more} more above)" if more else "")


def print_faults(trials: Sequence["Trial"], given_up: Mapping[str, int], console: Console) -> None:
    """Print how simulators failed, if they did, and what happened to the episodes: run again, or given up."""
    from pistar.evaluation.results import faults_of

    if not (faults := faults_of(trials)):
        return
    hit = sum(bool(trial.faults) for trial in trials)
    again = hit - sum(given_up.values())
    outcomes = {"was run again" if again == 1 else "were run again": again, **given_up}
    parts = [f"{number} {what}" for what, number in outcomes.items() if number]
    outcome = "all were run again" if again == hit else ", ".join(parts)
    counts = ", ".join(f"{kind} {count} ×" for kind, count in faults.items())
    console.print(f"note: the simulator failed ({counts}); of the episodes it hit, {outcome}.", markup=False)
