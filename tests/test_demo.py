"""`pistar demo --quick`: all of the road, in a budget that teaches nothing."""

import dataclasses
from pathlib import Path

import av
import numpy as np
import pytest

from metaworld_policy import fresh_checkpoint
from pistar import demo
from pistar.cli import main
from pistar.data.lerobot import open_dataset
from pistar.demo import Stage
from pistar.envs.env import EnvOptions, make_env
from pistar.envs.worker import Script
from pistar.training.evaluation import Setting, evaluate, prepare
from pistar.training.policy import load_policy
from pistar.training.results import Evaluation, load_evaluation

REACH = "metaworld/reach-v3"


def test_the_demo_runs_through_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    main(["demo", "--quick", "--out", str(out)])
    told = capsys.readouterr().out
    assert "BC on successes" in told
    assert "McNemar" in told
    assert "In so few updates nothing is learnt" in told
    assert len(open_dataset(out / "dataset").episodes) == 6
    judged = [load_evaluation(out / f"{name}.json") for name in ("bc", "successes", "acrlpd")]
    assert [len(each.results[0].trials) for each in judged] == [4, 4, 4]
    assert len({tuple(t.start_id for t in each.results[0].trials) for each in judged}) == 1
    assert "<svg" in (out / "result.svg").read_text()
    main(["verify", str(next((out / "runs" / "acrlpd" / "checkpoints").iterdir()))])
    assert "Whole and sound" in capsys.readouterr().out

    with pytest.raises(SystemExit):
        main(["demo", "--quick", "--out", str(out), "--seed", "1"])
    assert "holds a demo with seed 0; choose another --out" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(SystemExit):
        main(["demo", "--quick", "--out", "/proc/demo"])
    assert "--out is /proc/demo, which cannot be written" in capsys.readouterr().err.replace("\n", " ")

    # With nothing learnt, pretend there was a success to film: it does not come again, and nothing is shown for it.
    won = (out / "acrlpd.json").read_text().replace('"success": false', '"success": true', 1)
    (out / "acrlpd.json").write_text(won)
    main(["demo", "--quick", "--out", str(out)])
    told = capsys.readouterr().out
    assert told.count("done before") == 8
    otherwise = "No film: 1 start state where BC fails and ACRLPD succeeds came out otherwise when run again."
    assert otherwise in " ".join(told.split())
    assert not list(out.glob("*.mp4"))

    monkeypatch.setenv("MUJOCO_GL", "disable")
    main(["demo", "--quick", "--out", str(out)])
    told = " ".join(capsys.readouterr().out.split())
    assert "No film: MuJoCo cannot render here" in told
    assert "pistar verify finds it whole and sound" in told


def reaching(folder: Path, start_id: int, speed: float) -> Path:
    """A policy that always moves towards the goal of one start state."""
    arm = make_env(REACH)
    arm.begin(start_id)
    state = arm.observe()["state"]
    way = state[14:17] - state[:3]
    return fresh_checkpoint(folder, always=(*(speed * way / np.abs(way).max()), 0.0))


def pretending(found: Evaluation, **outcomes: bool) -> Evaluation:
    """By `start_2=True` and so on."""
    (task,) = found.results
    trials = list(task.trials)
    for name, success in outcomes.items():
        index = int(name.removeprefix("start_"))
        trials[index] = dataclasses.replace(trials[index], success=success)
    return dataclasses.replace(found, results=(dataclasses.replace(task, trials=tuple(trials)),))


def test_the_film_shows_a_start_where_imitation_fails_and_the_other_succeeds(tmp_path: Path) -> None:
    stage = Stage(REACH, 70, Script(""), {"bc": "BC, which stays", "rl": "RL"}, ("bc", "rl"))
    aim = 1_000_002
    checkpoints = {name: reaching(tmp_path / name, aim, speed) for name, speed in (("bc", 0.0), ("rl", 1.0))}
    setting = Setting(REACH, 3, options=EnvOptions(limit=stage.limit), environments=4, workers=0, seed=5)
    judged = {}
    for name, path in checkpoints.items():
        player = demo._player(load_policy(path), 5)
        judged[name] = evaluate(prepare(setting, player, checkpoint=name, weights="serving"), setting, player)
    assert [trial.success for trial in judged["bc"].results[0].trials] == [False, False, False]
    assert [trial.success for trial in judged["rl"].results[0].trials] == [False, False, True]

    # What it was not is tried first, and is not taken.
    lying = {**judged, "rl": pretending(judged["rl"], start_0=True)}
    told = demo._film(stage, checkpoints, lying, tmp_path, 5)
    film = tmp_path / "bc_and_rl.mp4"
    assert told == f"Filmed {film}: start state {aim}, where BC fails and RL succeeds."
    with av.open(str(film)) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    height, width, _ = pictures[0].shape
    assert width == 2 * height
    # On the left nothing moves any more, on the right the arm does. Above are the captions.
    moved = np.abs(pictures[-1][30:].astype(int) - pictures[0][30:])
    assert moved[:, height:].mean() > 2 * moved[:, :height].mean()
    film.unlink()

    nowhere = pretending(lying["rl"], start_2=False)
    assert "1 start state where BC fails and RL succeeds came out otherwise" in demo._film(
        stage, checkpoints, {**judged, "rl": nowhere}, tmp_path, 5
    )
    none = demo._film(stage, checkpoints, {**judged, "rl": judged["bc"]}, tmp_path, 5)
    assert none == "No start state where BC fails and RL succeeds, so no film."
    assert not film.exists()


def test_the_demo_of_practice_runs_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    main(["demo", "--algo", "ript", "--quick", "--out", str(out)])
    told = capsys.readouterr().out
    assert "RIPT against BC, start state by start state" in told
    assert len(open_dataset(out / "dataset").episodes) == 2
    judged = [load_evaluation(out / f"{name}.json") for name in ("bc", "ript")]
    assert [len(each.results[0].trials) for each in judged] == [4, 4]
    assert "held-out successes" in (out / "result.svg").read_text()
    main(["verify", str(out / "runs" / "ript" / "checkpoints" / "1")])
    assert "Whole and sound" in capsys.readouterr().out
