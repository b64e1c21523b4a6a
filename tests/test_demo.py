"""`pistar demo` end to end, on the checkpoint OpenPI itself wrote."""

from pathlib import Path

import pytest

from pistar.cli import main

import goldens

ARCHIVE = str(goldens.OPENPI / "openpi_ckpt_pi0_tiny.tar.gz")
OPTIONS = ["--robot", "aloha", "--action-horizon", "10", "--tokenizer", "tiny"]


def test_demo_draws_actions_and_writes_a_checkpoint_that_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["demo", ARCHIVE, *OPTIONS, "--out", str(tmp_path / "demo")])
    told = capsys.readouterr().out
    assert "Sampled 8 chunks of 10 actions" in told
    assert (tmp_path / "demo" / "actions.svg").read_text().count("<polyline") == 8 * 14
    main(["verify", str(tmp_path / "demo" / "checkpoint" / "0"), "--tokenizer", "tiny", "--model-type", "pi0"])
    verified = capsys.readouterr().out
    assert "aloha (trossen), prompt format pi0" in verified
    assert "✗" not in verified


def test_demo_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoint" / "0").mkdir(parents=True)
    with pytest.raises(SystemExit, match="1"):
        main(["demo", ARCHIVE, *OPTIONS, "--out", str(tmp_path)])
    assert "exists already" in capsys.readouterr().err
    assert not (tmp_path / "actions.svg").exists()


def test_demo_of_a_full_size_vocabulary_needs_paligemmas_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OPENPI_DATA_HOME", raising=False)
    with pytest.raises(SystemExit, match="1"):
        main(["demo", ARCHIVE, "--robot", "aloha", "--action-horizon", "10", "--out", str(tmp_path / "demo")])
    error = capsys.readouterr().err
    assert "No PaliGemma tokenizer" in error
    assert error.count("\n") == 1


def test_demo_of_a_checkpoint_with_a_contract_needs_nothing_and_keeps_it(tmp_path: Path) -> None:
    main(["demo", ARCHIVE, *OPTIONS, "--out", str(tmp_path / "first")])
    first = tmp_path / "first" / "checkpoint" / "0"
    main(["demo", str(first), "--out", str(tmp_path / "second")])
    second = tmp_path / "second" / "checkpoint" / "0"
    assert (second / "contract.json").read_text() == (first / "contract.json").read_text()


def test_demo_that_cannot_start_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        main(["demo", ARCHIVE, "--robot", "alohha", "--out", str(tmp_path / "demo")])
    assert "There is no robot 'alohha'; try aloha" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_demo_into_a_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="1"):
        main(["demo", ARCHIVE, *OPTIONS, "--out", str(tmp_path / "file")])
    error = capsys.readouterr().err
    assert "check the path and its permissions" in error
    assert error.count("\n") == 1
