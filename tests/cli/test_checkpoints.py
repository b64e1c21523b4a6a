"""`pistar export`, `import` and `verify`."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from pistar.checkpoints.convert import convert as conversion
from pistar.checkpoints.reader import read_params
from pistar.cli import main as cli


def fails(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def words(text: str) -> str:
    """The text of a table, without its lines."""
    return " ".join(text.translate({ord(c): " " for c in "│┃┌┐└┘├┤─┬┴┼"}).split())


def test_export_prints_the_proof_and_the_differences(
    openpi_goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(openpi_goldens / "openpi_ckpt_pi0_tiny.tar.gz")
    cli.main(["export", source, "--format", "lerobot", "--out", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    printed = words(out)
    assert "π₀, openpi → lerobot" in printed
    assert "50 parameters: mapped back, every checksum equals the source's" in printed
    assert "statistics of trossen, number for number" in printed
    assert "pistar's model gives the same numbers with both, bit for bit" in printed
    assert 'look for "All keys loaded successfully!"' in printed
    useless = "LeRobot knows only gemma_2b with gemma_300m, which this is not: it cannot load this folder."
    assert out.endswith(f"Wrote {tmp_path / 'out'}. But {useless}\n")
    assert printed.index(useless) < printed.index("time embedding")
    assert err == ""
    assert {"config.json", "model.safetensors", "policy_preprocessor.json"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }


def test_export_rounds_to_the_given_dtype(
    openpi_goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(openpi_goldens / "openpi_ckpt_pi05_tiny.tar.gz")
    args = ["--format", "openpi-pytorch", "--dtype", "bfloat16", "--out", str(tmp_path / "out"), "--skip-outputs"]
    cli.main(["export", source, *args])
    printed = words(capsys.readouterr().out)
    assert "51 parameters to the nearest bfloat16; mapped back, they are equal" in printed
    assert "the model was not run on both: not requested" in printed
    assert json.loads((tmp_path / "out/config.json").read_text())["precision"] == "bfloat16"


def test_import_makes_an_openpi_checkpoint(
    pytorch_goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = str(pytorch_goldens / "lerobot_pi0_tiny"), tmp_path / "out"
    cli.main(["import", source, "--out", str(out), "--asset-id", "towel", "--skip-outputs"])
    printed = words(capsys.readouterr().out)
    assert "π₀, lerobot → openpi" in printed
    assert "statistics of towel" in printed
    assert "action horizon 10, prompts of 48 tokens" in printed
    assert len(read_params(out)) == 50
    cli.main(["verify", str(out)])
    assert "Whole and sound." in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "version"), [("pi0", "lerobot"), ("pi05", "lerobot061")])
def test_a_lerobot_policy_goes_to_openpis_pytorch_and_comes_back(
    pytorch_goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, version: str
) -> None:
    source, there, back = pytorch_goldens / f"{version}_{kind}_tiny", tmp_path / "there", tmp_path / "back"
    args = ["--asset-id", "towel", "--skip-outputs"]
    cli.main(["export", str(source), "--format", "openpi-pytorch", "--out", str(there), *args])
    assert "lerobot → openpi-pytorch" in words(capsys.readouterr().out)
    theirs = pytorch_goldens / f"openpi_pt_{kind}_tiny.safetensors"
    assert (there / "model.safetensors").read_bytes() == theirs.read_bytes()
    cli.main(["export", str(there), "--format", "lerobot", "--out", str(back), "--skip-outputs"])
    assert "openpi-pytorch → lerobot" in words(capsys.readouterr().out)
    sums = dict(line.split()[::-1] for line in (pytorch_goldens / "lerobot_model_sha256.txt").read_text().splitlines())
    written = hashlib.sha256((back / "model.safetensors").read_bytes()).hexdigest()
    assert written == sums[f"lerobot061_{kind}_tiny/model.safetensors"]  # both tied tensors, as 0.6.1 has them
    older = pytorch_goldens / f"lerobot_{kind}_tiny"
    for name in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"):
        assert json.loads((back / name).read_text()) == json.loads((older / name).read_text())
    cli.main(["verify", str(back)])
    assert "Whole and sound." in capsys.readouterr().out


def test_mistakes_are_one_line(
    openpi_goldens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = str(openpi_goldens / "openpi_ckpt_pi0_tiny.tar.gz"), tmp_path / "out"
    err = fails(["export", source, "--format", "torch", "--out", str(out)], capsys)
    assert err == "error: there is no format 'torch'; try openpi-pytorch.\n"
    err = fails(["export", source, "--format", "openpi", "--dtype", "float16", "--out", str(out)], capsys)
    assert err == "error: --dtype is float16, in which no π₀ is stored; give float32 or bfloat16, or leave it out.\n"
    err = fails(["import", source, "--format", "lerobot", "--out", str(out)], capsys)
    assert "import has no --format: it finds out the source's format itself and writes openpi; leave it out" in err
    err = fails(["import", str(tmp_path / "nowhere"), "--out", str(out)], capsys)
    assert "does not exist; name a checkpoint folder (with params/ or model.safetensors in it)" in err
    err = fails(["export", source, "--format", "lerobot", "--merge-lora", "--out", str(out)], capsys)
    assert f"{source}/" in err  # the archive, and not where it was unpacked to
    assert "has no adapters to merge" in err
    err = fails(["export", source, "--format", "lerobot", "--vlm-alpha", "8", "--out", str(out)], capsys)
    assert "--vlm-alpha is 8, which is used to merge adapters, but nothing is merged: add --merge-lora." in err
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    err = fails(["export", source, "--format", "lerobot", "--out", str(tmp_path / "full")], capsys)
    assert "is there already and not empty" in err
    err = fails(["export", source, "--format", "lerobot", "--out", str(tmp_path / "full/file")], capsys)
    assert "full/file is a file; name a new folder." in err
    monkeypatch.setattr(conversion, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 0))
    err = fails(["export", source, "--format", "openpi", "--out", str(out)], capsys)
    assert "would take 1 MB and 0 MB are free there; make room" in err
    assert not out.exists()
