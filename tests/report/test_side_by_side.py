"""The film of two policies shows a start state where one fails and the other succeeds."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np

from pistar.data.robots import find_robot
from pistar.envs.base import EnvOptions, make_env
from pistar.envs.rollout import Act, Request
from pistar.evaluation.evaluate import ActingPolicy, EpisodeSettings, PolicyRecord, evaluate, prepare_evaluation
from pistar.report.side_by_side import Side, film_difference

REACH = "metaworld/reach-v3"
GOAL = 1_000_002
"""The start state whose goal is reached."""
CHUNK = 5
SETTINGS = EpisodeSettings(REACH, 3, options=EnvOptions(limit=30), environments=4, workers=0)


def reaching(speed: float, counts: list[int]) -> ActingPolicy:
    """A policy that always moves towards the goal of one start state. Appends the environments it is made for."""
    arm = make_env(REACH)
    arm.begin(GOAL)
    state = arm.observe()["state"]
    arm.close()
    way = state[14:17] - state[:3]
    action = np.array([*(speed * way / np.abs(way).max()), 0.0])

    def make(count: int) -> Act:
        counts.append(count)
        return act

    def act(requests: Sequence[Request]) -> np.ndarray:
        return np.tile(action, (len(requests), CHUNK, 1))

    return ActingPolicy(make, find_robot("metaworld"), CHUNK)


def evaluated(name: str, policy: ActingPolicy) -> Side:
    prepared = prepare_evaluation(SETTINGS, policy, PolicyRecord(checkpoint=name, weights="serving"))
    return Side(name, policy, evaluate(prepared, SETTINGS, policy))


def pretending(side: Side, outcomes: dict[int, bool]) -> Side:
    """With other outcomes of some episodes."""
    (task,) = side.evaluation.results
    trials = list(task.trials)
    for index, success in outcomes.items():
        trials[index] = dataclasses.replace(trials[index], success=success)
    results = (dataclasses.replace(task, trials=tuple(trials)),)
    return dataclasses.replace(side, evaluation=dataclasses.replace(side.evaluation, results=results))


def test_the_film_shows_a_start_state_where_one_fails_and_the_other_succeeds(tmp_path: Path) -> None:
    counts: list[int] = []
    bc, rl = (evaluated(name, reaching(speed, counts)) for name, speed in (("BC", 0.0), ("RL", 1.0)))
    assert [trial.success for trial in bc.evaluation.trials] == [False, False, False]
    assert [trial.success for trial in rl.evaluation.trials] == [False, False, True]

    # The first start state comes out otherwise when run again; the third is filmed.
    film = tmp_path / "film.mp4"
    printed = film_difference(bc, pretending(rl, {0: True}), film)
    assert printed == f"Filmed {film}: start state {GOAL}, where BC fails and RL succeeds."
    assert set(counts) == {4}, "run again in batches of the evaluation's shape"
    with av.open(str(film)) as container:
        images = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    height, width, _ = images[0].shape
    assert width == 2 * height
    # On the left nothing moves, on the right the arm does. Captions are at the top.
    moved = np.abs(images[-1][30:].astype(int) - images[0][30:])
    assert moved[:, height:].mean() > 2 * moved[:, :height].mean()
    film.unlink()

    printed = film_difference(bc, pretending(rl, {0: True, 2: False}), film)
    assert printed == "No film: 1 start state where BC fails and RL succeeds came out otherwise when run again."
    printed = film_difference(bc, dataclasses.replace(bc, name="RL"), film)
    assert printed == "No start state where BC fails and RL succeeds, so no film."
    assert not film.exists()
