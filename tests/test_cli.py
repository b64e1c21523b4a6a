import subprocess
import sys
from pathlib import Path

import pytest

from pistar import cli
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
