"""`pistar demo --quick`: all of the road, in a budget that teaches nothing."""

from pathlib import Path

import av
import pytest

from pistar.cli import main
from pistar.data.lerobot import open_dataset
from pistar.training.evaluation import load_evaluation


def test_the_demo_runs_through_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    main(["demo", "--quick", "--out", str(out)])
    told = capsys.readouterr().out
    assert "BC on successes" in told
    assert "McNemar" in told
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

    # Where imitation fails and ACRLPD succeeds there is a film; with nothing learnt, pretend that was so.
    won = (out / "acrlpd.json").read_text().replace('"success": false', '"success": true', 1)
    (out / "acrlpd.json").write_text(won)
    main(["demo", "--quick", "--out", str(out)])
    told = capsys.readouterr().out
    assert told.count("done before") == 8
    with av.open(str(out / "bc_and_acrlpd.mp4")) as film:
        frame = next(film.decode(video=0))
    assert frame.width == 2 * frame.height


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
