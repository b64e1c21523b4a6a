import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from pistar.checkpoints.safetensors import SafetensorsFile, SafetensorsWriter, Tensor, write_safetensors
from pistar.errors import UserError


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"b": rng.standard_normal((5, 3), np.float32), "a": rng.standard_normal(4, np.float32)}


def test_the_package_writes_the_same_file(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    write_safetensors(tmp_path / "ours", arrays, {"left out": "kept"})
    safetensors.numpy.save_file(arrays, tmp_path / "theirs", {"left out": "kept"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_wide_numbers_come_first_and_the_package_reads_both(tmp_path: Path) -> None:
    narrow, wide = np.arange(6, dtype=jnp.bfloat16), np.arange(3, dtype=np.float32)
    write_safetensors(tmp_path / "mixed", {"a": narrow, "b": wide})
    file = SafetensorsFile(tmp_path / "mixed")
    assert file.tensors["b"].start < file.tensors["a"].start
    with safetensors.safe_open(tmp_path / "mixed", "np") as theirs:
        np.testing.assert_array_equal(theirs.get_tensor("b"), wide)
    assert file.read("a").tobytes() == narrow.tobytes()


def test_rows_are_written_and_read_alone(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "f", {name: Tensor(a.shape, a.dtype) for name, a in arrays.items()}) as writer:
        writer.write("b", arrays["b"][3:], 3)
        writer.write("a", arrays["a"])
        writer.write("b", arrays["b"][:3])
    file = SafetensorsFile(tmp_path / "f")
    np.testing.assert_array_equal(file.read("b"), arrays["b"])
    np.testing.assert_array_equal(file.read("b", (2, 4)), arrays["b"][2:4])


def test_what_is_not_written_is_zero(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "f", {"x": Tensor((2, 2), np.dtype(np.float32))}):
        pass
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "f")["x"], np.zeros((2, 2)))


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_files_that_pytorch_wrote_are_read_as_the_package_reads_them(pytorch_goldens: Path, kind: str) -> None:
    path = pytorch_goldens / f"openpi_pt_{kind}_tiny.safetensors"
    file, theirs = SafetensorsFile(path), safetensors.numpy.load_file(path)
    assert set(file.tensors) == set(theirs)
    for name, array in theirs.items():
        assert file.read(name).tobytes() == array.tobytes()


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(pytorch_goldens: Path, tmp_path: Path, size: int) -> None:
    whole = (pytorch_goldens / "openpi_pt_pi0_tiny.safetensors").read_bytes()
    (tmp_path / "f").write_bytes(whole[:size])
    with pytest.raises(UserError, match=r"truncated or damaged, copy or download it again"):
        SafetensorsFile(tmp_path / "f")


def test_a_file_that_git_lfs_has_not_fetched_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 14478672384\n")
    with pytest.raises(UserError, match=r"f is only a pointer to the file, .* run `git lfs pull`"):
        SafetensorsFile(tmp_path / "f")


def with_table(path: Path, table: object, data: bytes) -> Path:
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([], "no readable table of tensors"),
        ({"x": {"dtype": "F32", "shape": [1]}}, "no readable table of tensors"),
        ({"x": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}, "x is F16; pistar reads F32 and BF16"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "4 bytes where its shape needs 8"),
        ({"x": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}}, "x does not begin where"),
        ({"x": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}, "and its table describes"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, table: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        SafetensorsFile(with_table(tmp_path / "f", table, b"1234"))


def test_a_file_cut_after_it_was_opened_is_noticed(pytorch_goldens: Path, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes((pytorch_goldens / "openpi_pt_pi0_tiny.safetensors").read_bytes())
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"state_proj\.weight is cut off"):
        file.read("state_proj.weight")


def test_the_fixtures_are_what_lerobot_wrote(pytorch_goldens: Path) -> None:
    """Two of LeRobot's four weight files are stored; of the others only the checksum."""
    sums = dict(line.split()[::-1] for line in (pytorch_goldens / "lerobot_model_sha256.txt").read_text().splitlines())
    kept = [name for name in sums if (pytorch_goldens / name).exists()]
    assert len(kept) == 2
    for name in kept:
        assert hashlib.sha256((pytorch_goldens / name).read_bytes()).hexdigest() == sums[name]
