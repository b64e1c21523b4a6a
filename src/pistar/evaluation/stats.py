"""Confidence intervals and tests of counts."""

import math


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """(p̂ + z²/2n ± z·√(p̂(1 − p̂)/n + z²/4n²)) / (1 + z²/n), z = 1.96: the 95 % interval of a rate."""
    if trials == 0:
        return 0.0, 1.0
    z, p = 1.959964, successes / trials
    centre, spread = p + z * z / (2 * trials), z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    low, high = (centre - spread) / (1 + z * z / trials), (centre + spread) / (1 + z * z / trials)
    return max(low, 0.0), min(high, 1.0)  # rounding may exceed it


def mcnemar(only_first: int, only_second: int) -> float:
    """p-value of equally good policies, from start states where just one succeeded: 2·P(X ≤ min), X ~ B(n, ½)."""
    n, fewer = only_first + only_second, min(only_first, only_second)
    return float(min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n))
