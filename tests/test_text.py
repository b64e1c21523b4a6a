import pytest

from pistar.text import counted, numbered


def test_one_is_singular_and_all_others_are_plural() -> None:
    assert [counted(n, "error") for n in (0, 1, 2)] == ["0 errors", "1 error", "2 errors"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([4], "episode 4"), ([4, 5], "episodes 4, 5"), ([0, 1, 2, 3, 7, 9, 10, 11], "episodes 0–3, 7, 9–11")],
)
def test_consecutive_numbers_are_a_range(numbers: list[int], text: str) -> None:
    assert numbered(numbers, "episode") == text
