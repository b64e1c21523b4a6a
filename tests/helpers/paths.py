"""Where the project's and the tests' files are."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
FIXTURES = TESTS / "fixtures"


def program(name: str) -> str:
    """The path of a script in tests/programs, which a test runs in a process of its own."""
    path = TESTS / "programs" / f"{name}.py"
    assert path.exists()
    return str(path)
