"""A film of two policies side by side, from a start state where one fails and the other succeeds."""

import dataclasses
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from pistar.envs.base import EnvOptions
from pistar.envs.rollout import Rollout, roll_out
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import Script
from pistar.evaluation.evaluate import ActingPolicy
from pistar.evaluation.results import Evaluation
from pistar.report.video import write_video
from pistar.text import counted

TRIES = 5
"""Start states to run again for a film."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One policy of the film, and its evaluation on one task."""

    name: str
    policy: ActingPolicy
    evaluation: Evaluation


def film_difference(before: Side, after: Side, path: Path) -> str:
    """Film a start state where `before` fails and `after` succeeds; returns a sentence about it.

    Both are run again for it, alone, which may change their last bits: a start state that does not come out as in the
    evaluation is not shown, and another one is tried.
    """
    (lost,), (gained,) = (side.evaluation.results for side in (before, after))
    starts = [
        one.start_id
        for one, other in zip(lost.trials, gained.trials, strict=True)
        if one.success is False and other.success
    ]
    case = f"where {before.name} fails and {after.name} succeeds"
    if not starts:
        return f"No start state {case}, so no film."
    with Environments(lost.env, EnvOptions(limit=lost.limit), count=1, workers=1) as envs:
        for start_id in starts[:TRIES]:
            again = [_run_again(side, envs, start_id) for side in (before, after)]
            if [rollout.episode is not None and rollout.episode.success for rollout in again] == [False, True]:
                break
        else:
            tried = counted(len(starts[:TRIES]), "start state")
            return f"No film: {tried} {case} came out otherwise when run again."
    films = [
        [_captioned(frame, side.name) for frame in rollout.film]
        for side, rollout in zip((before, after), again, strict=True)
    ]
    length = max(map(len, films))
    frames = [np.concatenate([film[min(i, len(film) - 1)] for film in films], axis=1) for i in range(length)]
    write_video(path, frames, envs.scene.fps)
    return f"Filmed {path}: start state {start_id}, {case}."


def _run_again(side: Side, envs: Environments, start_id: int) -> Rollout:
    assert not isinstance(side.policy.act, Script)
    # In a batch of the shape of its evaluation, which decides the last bits.
    act = side.policy.act(side.evaluation.environments)
    (rollout,) = roll_out(envs, [start_id], act, execute=side.evaluation.execute, films=1)
    return rollout


def _captioned(frame: UInt8[np.ndarray, "h w 3"], text: str) -> UInt8[np.ndarray, "h w 3"]:
    picture = Image.fromarray(frame)
    ImageDraw.Draw(picture).text((6, 4), text, fill=(20, 20, 20), font_size=16)
    return np.asarray(picture)
