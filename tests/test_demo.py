"""`pistar demo --quick` runs from end to end, with budgets in which nothing is learnt."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pistar import demo
from pistar.cli.main import main
from pistar.data.lerobot.reader import open_dataset
from pistar.evaluation.evaluate import EpisodeSettings
from pistar.evaluation.results import load_evaluation


@pytest.fixture(autouse=True)
def _evaluate_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting workers takes most of the time of so few episodes. Demonstrations and RIPT's rollouts have workers."""
    settings = demo._settings

    def changed(*given: Any) -> EpisodeSettings:
        made = settings(*given)
        return dataclasses.replace(made, workers=0) if made.starts == "held-out" else made

    monkeypatch.setattr(demo, "_settings", changed)


def test_the_demo_runs_through_and_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    out = tmp_path / "demo"
    main(["demo", "--quick", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "BC on successes" in printed
    assert "McNemar" in printed
    assert "So few updates teach nothing" in printed
    assert len(open_dataset(out / "dataset").episodes) == 6
    evaluations = [load_evaluation(out / f"{name}.json") for name in ("bc", "successes", "acrlpd")]
    assert [len(each.results[0].trials) for each in evaluations] == [4, 4, 4]
    assert len({tuple(trial.start_id for trial in each.trials) for each in evaluations}) == 1
    assert "<svg" in (out / "result.svg").read_text()
    assert "No start state where BC fails and ACRLPD succeeds, so no film." in printed
    assert "runs/acrlpd/checkpoints/10 is an OpenPI checkpoint (pistar verify: complete and valid)" in printed

    with pytest.raises(SystemExit):
        main(["demo", "--quick", "--out", str(out), "--seed", "1"])
    assert "holds a demo with seed 0; choose another --out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--quick", "--out", "/proc/demo"])
    assert "--out is /proc/demo, which cannot be written" in capsys.readouterr().err

    # Nothing was learnt, so pretend a success to film, where nothing can be rendered.
    edited = (out / "acrlpd.json").read_text().replace('"success": false', '"success": true', 1)
    (out / "acrlpd.json").write_text(edited)
    monkeypatch.setenv("MUJOCO_GL", "disable")
    main(["demo", "--quick", "--out", str(out)])
    printed = capsys.readouterr().out
    assert printed.count("done before") == 8
    assert "No film: MuJoCo cannot render here" in printed
    assert "pistar verify: complete and valid" in printed
    assert not list(out.glob("*.mp4"))


def test_the_demo_of_ript_runs_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    out = tmp_path / "demo"
    main(["demo", "--algo", "ript", "--quick", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "RIPT against BC, start state by start state" in printed
    assert len(open_dataset(out / "dataset").episodes) == 2
    evaluations = [load_evaluation(out / f"{name}.json") for name in ("bc", "ript")]
    assert [len(each.results[0].trials) for each in evaluations] == [4, 4]
    assert "held-out successes" in (out / "result.svg").read_text()
    assert "runs/ript/checkpoints/1 is an OpenPI checkpoint (pistar verify: complete and valid)" in printed
