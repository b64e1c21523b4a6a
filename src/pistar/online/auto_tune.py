"""Adapt the learning rate and the length of an iteration to how the last one went."""

import math
from collections.abc import Iterator, Mapping

from pistar.online.history import RunHistory

TARGET_DRIFT, TOLERANCE = 0.01, 2.0
"""Mean square change of the velocity in an iteration, and the factor by which it may be missed."""
FACTOR, MOST = 1.5, 4.0
"""Factor of a change, and the largest factor in all, either way."""
SCARCE, PLENTY = 0.2, 0.6
"""Fractions of informative groups below which an iteration is made shorter, and above which longer."""


def tune(history: RunHistory, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Set the scales of the next iteration; yields the name of each change and its reason.

    The learning rate follows the drift, the number of updates how many groups were informative.
    """
    drift = metrics.get("train/drift", 0.0)
    if metrics.get("train/updates", 0.0):
        wanted = history.lr_scale
        if drift > TARGET_DRIFT * TOLERANCE:
            wanted = history.lr_scale / FACTOR
        elif drift < TARGET_DRIFT / TOLERANCE:
            wanted = history.lr_scale * FACTOR
        wanted = min(max(wanted, min(history.lr_scale, 1 / MOST)), MOST)  # rollbacks may have made it smaller still
        if not math.isclose(wanted, history.lr_scale):
            history.lr_scale = wanted
            yield "learning rate", f"drift {drift:.3g} for a target of {TARGET_DRIFT:g}; now {wanted:.3g} ×"
    fraction = metrics["rollout/informative_groups"] / max(metrics["rollout/groups"], 1.0)
    wanted = history.epoch_scale
    if fraction < SCARCE:
        wanted = history.epoch_scale / FACTOR
    elif fraction > PLENTY:
        wanted = history.epoch_scale * FACTOR
    wanted = min(max(wanted, 1 / MOST), MOST)
    if not math.isclose(wanted, history.epoch_scale):
        history.epoch_scale = wanted
        yield "epochs", f"{fraction:.0%} of the groups were informative; now {wanted:.3g} ×"
