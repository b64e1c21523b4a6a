import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from pistar import cli
from pistar.data.hdf5 import Conversion
from pistar.data.lerobot import open_dataset
from pistar.data.norm_stats import load_norm_stats
from pistar.presets import MODELS


def test_verify_shows_facts_and_checks(openpi_goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["verify", str(openpi_goldens / "openpi_ckpt_pi05_tiny.tar.gz"), "--tokenizer", "tiny"])
    out, err = capsys.readouterr()
    assert "π₀.₅ (pi05)" in out
    assert "✓ │ norm stats" in out
    assert "✗" not in out
    assert err == ""


def test_verify_fails_with_the_reason(openpi_goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = openpi_goldens / "openpi_ckpt_pi05_tiny.tar.gz"
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", str(path), "--model-type", "pi0", "--action-dim", "14"])
    out, err = capsys.readouterr()
    assert end.value.code == 1
    assert out.count("✗") == 2
    assert err == (
        f"error: {path}: the model type is pi05, not the pi0 that was asked for; "
        "bring another checkpoint or ask for pi05. (and 1 more above)\n"
    )


def test_a_single_problem_stands_alone(openpi_goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["verify", str(openpi_goldens / "openpi_ckpt_pi05_tiny.tar.gz"), "--action-dim", "14"])
    assert capsys.readouterr().err.endswith("ask for 32.\n")


def test_a_mistake_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", str(tmp_path / "[nowhere]")])
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"error: {tmp_path}/[nowhere] does not exist; name a checkpoint folder (with params/ in it) or its .tar.gz.\n"
    )


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["presets"])
    out = capsys.readouterr().out
    assert all(name in out for name in MODELS)
    assert "LoRA 16" in out


def test_version_and_help_need_no_jax() -> None:
    code = (
        "import sys; from pistar.cli import main; main(['--version']);"
        "assert not {'jax', 'tensorstore', 'orbax'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pistar ")


def test_the_command_line_is_the_default_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pistar", "--version"])
    cli.main()
    assert capsys.readouterr().out.startswith("pistar ")


def test_a_misspelt_command_answers_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli.main(["verfy", "x"])
    assert capsys.readouterr().err == "error: there is no command 'verfy'; try verify.\n"


def test_data_stats_writes_openpis_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = Path(__file__).parent / "fixtures" / "lerobot" / "lerobot_v30"
    out = tmp_path / "assets" / "mine"
    cli.main(["data", "stats", str(dataset), "--robot", "aloha", "--out", str(out), "--horizon", "5"])
    stats = load_norm_stats(out / "norm_stats.json")
    assert {name: len(entry.mean) for name, entry in stats.items()} == {"state": 14, "actions": 14}
    assert "12 episodes" in capsys.readouterr().out


def test_data_convert_tells_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "score_5").mkdir(parents=True)
    with h5py.File(tmp_path / "in" / "score_5" / "episode_0.hdf5", "w") as file:
        file["action"] = np.zeros((4, 14), np.float32)
        file["observations/qpos"] = np.zeros((4, 14), np.float32)
        file["observations/images/cam_high"] = np.zeros((4, 32, 32, 3), np.uint8)
    cli.main(["data", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--task", "wave"])
    assert "1 episodes, 4 frames, 1 successes" in capsys.readouterr().out
    assert open_dataset(tmp_path / "out").total_frames == 4


def test_data_convert_tells_that_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resumed(folder: Path, out: Path, *, progress: Callable[[int, int], None], **_: object) -> Conversion:
        for ready in (12, 40):
            progress(ready, 40)
        return Conversion(out, episodes=40, frames=80, successes=3, notes=())

    monkeypatch.setattr("pistar.data.hdf5.convert_hdf5", resumed)
    cli.main(["data", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--task", "wave"])
    captured = capsys.readouterr()
    assert captured.err == "continuing: 12 of 40 episodes were already converted\n"
    assert "40 episodes, 80 frames, 3 successes" in captured.out


def test_data_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (
        ["stats", str(tmp_path), "--robot", "aloha", "--out", str(tmp_path / "o")],
        ["convert", str(tmp_path), str(tmp_path / "o"), "--task", "wave"],
        ["stat", "x"],
    ):
        with pytest.raises(SystemExit, match="1"):
            cli.main(["data", *args])
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert not (tmp_path / "o").exists()
