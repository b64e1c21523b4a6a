"""Intervals and p values, against SciPy's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from pistar.evaluation.stats import mcnemar, wilson

TRIALS = st.integers(1, 2000)


@given(st.data(), TRIALS)
def test_wilson_is_scipys(data: st.DataObject, trials: int) -> None:
    successes = data.draw(st.integers(0, trials))
    expected = binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="wilson")
    assert wilson(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-7)


def test_wilson_at_the_edges() -> None:
    assert wilson(0, 0) == (0.0, 1.0), "nothing was tried, nothing is known"
    z2 = 1.959964**2
    # With p̂ = 0 the formula is (z²/2n ± z²/2n) / (1 + z²/n); p̂ = 1 mirrors it.
    assert wilson(0, 10) == pytest.approx((0.0, z2 / (10 + z2)))
    assert wilson(10, 10) == pytest.approx((10 / (10 + z2), 1.0))


def test_wilson_of_a_published_example() -> None:
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (successes, trials), bounds in published.items():
        assert [round(bound, 4) for bound in wilson(successes, trials)] == pytest.approx(bounds)


@given(st.data(), TRIALS)
def test_wilson_holds_the_rate_is_mirrored_and_within_0_and_1(data: st.DataObject, trials: int) -> None:
    successes = data.draw(st.integers(0, trials))
    low, high = wilson(successes, trials)
    assert 0 <= low <= high <= 1
    assert low - 1e-12 <= successes / trials <= high + 1e-12
    mirrored = wilson(trials - successes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)
    more_low, more_high = wilson(2 * successes, 2 * trials)
    assert more_high - more_low < high - low, "twice as much is known"


@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_the_exact_binomial_test(only_first: int, only_second: int) -> None:
    n = only_first + only_second
    expected = binomtest(min(only_first, only_second), n, 0.5).pvalue if n else 1.0
    assert mcnemar(only_first, only_second) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(only_first, only_second) == mcnemar(only_second, only_first)


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0  # twice the lower half, middle included, would be more than 1
    assert mcnemar(5, 0) == 2 / 2**5
    assert mcnemar(1, 8) == 2 * (1 + 9) / 2**9
