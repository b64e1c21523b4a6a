import json
import shutil
from pathlib import Path

from pistar.data.checks.summary import camera_size, summarize_dataset
from pistar.data.lerobot.dataset import Feature

from helpers.paths import FIXTURES


def test_without_a_column_of_successes_their_number_is_unknown(tmp_path: Path) -> None:
    source, root = FIXTURES / "lerobot" / "lerobot_v30", tmp_path / "d"
    for part in ("meta", "data"):  # no video is opened
        shutil.copytree(source / part, root / part)
    assert summarize_dataset(root).successes == 8
    info = json.loads((root / "meta" / "info.json").read_text())
    del info["features"]["next.success"]
    (root / "meta" / "info.json").write_text(json.dumps(info))
    assert summarize_dataset(root).successes is None


def test_the_size_of_a_camera_is_width_by_height_in_either_order_of_axes() -> None:
    assert camera_size(Feature("video", (480, 640, 3))) == "640×480"
    assert camera_size(Feature("video", (3, 480, 640))) == "640×480"
    assert camera_size(Feature("video", ())) == "of unknown size"
