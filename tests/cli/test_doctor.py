import importlib.metadata
import re
from pathlib import Path

import pytest

import pistar
from pistar.cli import main as cli
from pistar.envs import rendering


def test_the_doctor_shows_what_is_there_and_how_to_get_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "wandb":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(rendering, "headless", lambda: "egl")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path / "openpi"))
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    rows = {row[1]: row for line in lines if len(row := [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]) == 4}
    assert f"pistar {pistar.__version__}, Python 3" in rows["versions"][2]
    assert "cpu" in rows["devices"][2]
    assert rows["devices"][3] == "for an NVIDIA GPU: pip install 'pistar-rl[cuda]'"
    assert re.match(r"[\d.]+ of [\d.]+ GB free", rows["memory"][2])
    assert f" GB free in {Path.cwd()}" in rows["disk"][2]
    assert rows["renderer"] == ["✓", "renderer", "MUJOCO_GL=egl, tried", ""]
    assert rows["tokenizer"][3].startswith(f"get it with `curl --create-dirs -o {tmp_path}/openpi/big_vision/")
    assert rows["wandb"] == ["·", "wandb", "no wandb", "pip install 'pistar-rl[wandb]'"]
    assert rows["hdf5"] == ["✓", "hdf5", f"h5py {version('h5py')}", ""]
