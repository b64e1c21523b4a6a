"""Numbers in sentences: "2 episodes", "0–3, 7"."""

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Write "1 episode" or "2 episodes"; for nouns whose plural ends in s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """Write sorted whole numbers as "0–3, 7, 9–11"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = (f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return ", ".join(parts)


def numbered(numbers: Sequence[int], noun: str) -> str:
    """Write "episode 4" or "episodes 0–3, 7"."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"
