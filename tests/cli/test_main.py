import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.text import Text

import pistar
from pistar.agents.config import AcrlpdConfig, RiptConfig
from pistar.cli import main as cli
from pistar.cli import runs as cli_runs
from pistar.cli.printing import make_table
from pistar.cli.printing import out as standard_output
from pistar.config.model_presets import MODELS
from pistar.config.presets import PRESETS
from pistar.config.train import RLTrainConfig, save_config
from pistar.data.hdf5.convert import ConvertedDataset
from pistar.data.lerobot.reader import open_dataset
from pistar.data.norm_stats import load_norm_stats
from pistar.online import loop
from pistar.online.history import RunHistory
from pistar.training import offline

from helpers.metaworld_policy import fresh_checkpoint
from helpers.paths import FIXTURES
from helpers.small_online_run import online_settings


def test_verify_shows_facts_and_checks(openpi_goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["verify", str(openpi_goldens / "openpi_ckpt_pi05_tiny.tar.gz"), "--tokenizer", "tiny"])
    out, err = capsys.readouterr()
    assert "π₀.₅ (pi05)" in out
    assert "✓ │ norm stats" in out
    assert "✗" not in out
    assert err == ""


def test_verify_of_a_run_with_one_checkpoint_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = fresh_checkpoint(tmp_path / "run" / "checkpoints")
    cli.main(["verify", str(tmp_path / "run")])
    assert capsys.readouterr().out.splitlines()[0].strip() == str(step)


def test_verify_fails_with_the_reason(openpi_goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = openpi_goldens / "openpi_ckpt_pi05_tiny.tar.gz"
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", str(path), "--model-type", "pi0", "--action-dim", "14"])
    out, err = capsys.readouterr()
    assert end.value.code == 1
    assert out.count("✗") == 2
    assert err == (
        f"error: {path}: the model type is pi05, not the requested pi0; "
        "use another checkpoint or request pi05 (and 1 more above).\n"
    )


def test_a_single_problem_is_reported_without_a_count(openpi_goldens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["verify", str(openpi_goldens / "openpi_ckpt_pi05_tiny.tar.gz"), "--action-dim", "14"])
    assert capsys.readouterr().err.endswith("request 32.\n")


def test_a_mistake_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", str(tmp_path / "[nowhere]")])
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"error: {tmp_path}/[nowhere] does not exist; name a checkpoint folder (with params/ or model.safetensors "
        "in it) or its .tar.gz.\n"
    )


def test_presets_are_listed_on_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():  # a terminal
        monkeypatch.setenv(name, value)
    cli.main(["presets"])
    out = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert all(name in out for name in (*MODELS, *PRESETS))
    assert "LoRA 16" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_piped_table_is_as_wide_as_its_content(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = make_table("name", "problem", title=Text("a/path/" * 20))
    table.add_row("ript_libero_spatial", sentence := "word " * 40 + "end")
    standard_output().print(table)
    title, *_, row, _ = capsys.readouterr().out.splitlines()
    assert title.strip() == "a/path/" * 20
    assert row == f"│ ript_libero_spatial │ {sentence} │"


def test_version_and_help_need_no_jax() -> None:
    code = (
        "import sys; from pistar.cli.main import main; main(['--version']);"
        "assert not {'jax', 'tensorstore', 'orbax'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"pistar {pistar.__version__}\n"


def test_the_command_line_is_the_default_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pistar", "--version"])
    cli.main()
    assert capsys.readouterr().out.startswith("pistar ")


def test_train_takes_a_preset_a_file_and_options_and_the_last_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training itself is tested with the loop."""
    asked: list[tuple[RLTrainConfig, dict[str, bool]]] = []

    def train(config: RLTrainConfig, _: object, **options: bool) -> Path:
        asked.append((config, options))
        return Path(str(config.steps))

    monkeypatch.setattr(offline, "train", train)
    settings = tmp_path / "mine.yaml"
    settings.write_text("seed: 3\nbatch_size: 16\npolicy_optimizer: {schedule: {peak_lr: 3e-3}}\n")
    cli.main(["train", "debug", "--config", str(settings), "--batch-size", "24", "--resume", "--exp-name", "towel"])
    config, options = asked[0]
    assert (config.name, config.seed, config.batch_size, config.exp_name) == ("debug", 3, 24, "towel")
    assert config.policy_optimizer.schedule.peak_lr == 3e-3
    assert options == {"resume": True, "overwrite": False, "dry_run": False, "debug": False}
    cli.main(["train", "debug", "--data.columns", "images/cam_high", "observation.images.top"])
    assert asked.pop()[0].data.columns == {"images/cam_high": "observation.images.top"}
    cli.main(["train", "bc_aloha_fold", "--lora"])
    adapted = asked[1][0]
    assert adapted.model == dataclasses.replace(MODELS["pi0_lora"], action_horizon=20)
    assert adapted.algorithm.ema_decay is None
    monkeypatch.setattr(offline, "train", lambda *_, **__: Path("7"))
    with pytest.raises(SystemExit, match="75"):  # stopped at step 7, before its end
        cli.main(["train", "debug"])
    capsys.readouterr()


def test_a_run_is_resumed_by_its_folder_and_options_still_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[RLTrainConfig, bool]] = []

    def train(config: RLTrainConfig, _: object, *, resume: bool, **options: bool) -> Path:
        asked.append((config, resume))
        return Path(str(config.steps))

    monkeypatch.setattr(offline, "train", train)
    config = dataclasses.replace(PRESETS["bc_metaworld"], runs=tmp_path, exp_name="towels/1", seed=3)
    config.folder.mkdir(parents=True)
    save_config(config.folder / "config.yaml", config)
    cli.main(["train", "--resume", str(config.folder)])
    cli.main(["train", "--steps", "40000", f"--resume={config.folder}"])
    cli.main(["train", "bc_metaworld", "--resume", "--exp-name", "towels/1", "--runs", str(tmp_path), "--seed", "3"])
    assert asked == [(config, True), (dataclasses.replace(config, steps=40_000), True), (config, True)]
    capsys.readouterr()
    for args in (["--resume", str(tmp_path)], ["debug", "--resume", str(config.folder)]):
        with pytest.raises(SystemExit, match="1"):
            cli.main(["train", *args])
    nothing, other = capsys.readouterr().err.strip().splitlines()
    assert nothing == f"error: {tmp_path} holds no run to resume (no config.yaml); name the folder of a run: runs/NAME."
    assert f"--resume names {config.folder} and the other options runs/debug; resume a run by its folder" in other


def test_a_reader_that_has_seen_enough_ends_a_command_quietly() -> None:
    """As in `pistar train debug --help | head`."""
    command = [sys.executable, "-c", "from pistar.cli.main import main; main(['train', 'debug', '--help'])"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--resume", "debug"], "put it first: pistar train debug --resume"),
        (["debgu"], "There is no preset 'debgu'; try debug"),
        (["debug", "--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["debug", "--batch-size", "0"], "batch_size is 0"),
        (
            ["ript_metaworld", "--log-every", "10"],
            "--log-every is 10, and ript_metaworld makes rollouts: it logs every",
        ),
        (
            ["--config", "rl_fold_bx"],
            "--config is 'rl_fold_bx', which is neither a YAML file nor a preset; did you mean",
        ),
        (["--config=rl_fold_bx"], "did you mean rl_fold_box?"),
        (["--config"], "--config is given without a file"),
        (
            ["--config", "mine.yaml"],
            "first word after `pistar train` is --config, where a preset's name belongs; `pist",
        ),
        (["--config", "nowhere/ript_metaworld.yaml"], "put it first: pistar train ript_metaworld --config"),
        (["--seed", "3", "debug"], "put it first: pistar train debug --seed"),
        (["debug", "--config"], "--config is given without a file; name one after it"),
        (["debug", "--config", "--resume"], "--config is given without a file; name one after it"),
    ],
)
def test_train_mistakes_are_one_line(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *args])
    assert stopped.value.code == 1
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error


def read_run(args: str) -> RLTrainConfig:
    _, config = cli_runs._read_run(cli_runs._run_parser("train", ""), args.split())
    return config


def test_none_is_a_choice_where_a_setting_has_it_and_else_no_value() -> None:
    config = read_run("rl_metaworld --algorithm.actor none --keep-every none --exp-name none")
    assert isinstance(config.algorithm, AcrlpdConfig)
    assert config.algorithm.actor == "none"
    assert (config.keep_every, config.exp_name) == (None, None)
    config = read_run("ript_metaworld --algorithm.replay none --online.updates none --online.health.max-drift=none")
    assert isinstance(config.algorithm, RiptConfig)
    assert config.algorithm.replay == "none"
    online = online_settings(config)
    assert (online.updates, online.health.max_drift) == (None, None)


@pytest.mark.parametrize(("updates", "what"), [(0, ", of the policy the run started with"), (5, ""), (None, "")])
def test_train_says_so_if_the_checkpoint_is_the_policy_it_started_with(
    updates: int | None,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = tmp_path / "12"
    saved.mkdir()
    RunHistory(updates=updates, finished=True).save(saved)
    monkeypatch.setattr(loop, "train", lambda *_, **__: saved)
    cli.main(["train", "ript_metaworld"])
    assert capsys.readouterr().out.replace("\n", "") == f"Saved {saved}: an OpenPI checkpoint{what}."


def test_train_without_a_preset_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train"])
    assert stopped.value.code == 2
    assert "rl_aloha_fold" in capsys.readouterr().out


def test_a_misspelt_command_answers_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli.main(["verfy", "x"])
    assert capsys.readouterr().err == "error: there is no command 'verfy'; try verify.\n"
    with pytest.raises(SystemExit, match="1"):
        cli.main(["trian", "debug"])
    assert capsys.readouterr().err == "error: there is no command 'trian'; try train.\n"


def test_data_stats_writes_openpis_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = FIXTURES / "lerobot" / "lerobot_v30"
    out = tmp_path / "assets" / "mine"
    cli.main(["data", "stats", str(dataset), "--robot", "aloha", "--out", str(out), "--horizon", "5"])
    stats = load_norm_stats(out / "norm_stats.json")
    assert {name: len(entry.mean) for name, entry in stats.items()} == {"state": 14, "actions": 14}
    assert "12 episodes" in capsys.readouterr().out


def test_data_convert_reports_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "score_5").mkdir(parents=True)
    with h5py.File(tmp_path / "in" / "score_5" / "episode_0.hdf5", "w") as file:
        file["action"] = np.zeros((4, 14), np.float32)
        file["observations/qpos"] = np.zeros((4, 14), np.float32)
        file["observations/images/cam_high"] = np.zeros((4, 32, 32, 3), np.uint8)
    cli.main(["data", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--task", "wave"])
    assert "1 episode, 4 frames, 1 success." in capsys.readouterr().out
    assert open_dataset(tmp_path / "out").total_frames == 4


def test_data_convert_reports_that_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resumed(folder: Path, out: Path, *, progress: Callable[[int, int], None], **_: object) -> ConvertedDataset:
        for ready in (12, 40):
            progress(ready, 40)
        return ConvertedDataset(out, episodes=40, frames=80, successes=3, notes=())

    monkeypatch.setattr("pistar.data.hdf5.convert.convert_hdf5", resumed)
    cli.main(["data", "convert", str(tmp_path / "in"), str(tmp_path / "out"), "--task", "wave"])
    captured = capsys.readouterr()
    assert captured.err == "continuing: 12 of 40 episodes were already converted\n"
    assert "40 episodes, 80 frames, 3 successes" in captured.out


def test_data_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (
        ["stats", str(tmp_path), "--robot", "aloha", "--out", str(tmp_path / "o")],
        ["convert", str(tmp_path), str(tmp_path / "o"), "--task", "wave"],
        ["check", str(tmp_path)],
        ["show", str(tmp_path), "0"],
        ["stat", "x"],
    ):
        with pytest.raises(SystemExit, match="1"):
            cli.main(["data", *args])
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert not (tmp_path / "o").exists()


LEROBOT = FIXTURES / "lerobot"


def test_data_check_of_an_intact_dataset_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["data", "check", str(LEROBOT / "lerobot_v30")])
    assert capsys.readouterr().out == "12 episodes: 12 intact, 0 fixable, 0 lost; 0 errors, 0 warnings.\n"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Video of episode 3 missing, statistics of episode 5 wrong, a wrong total."""
    root = Path(shutil.copytree(LEROBOT / "lerobot_v21", tmp_path / "broken"))
    (root / "videos/chunk-000/observation.images.cam_high/episode_000003.mp4").unlink()
    for name, old, new in (
        ("info.json", '"total_frames": 850', '"total_frames": 851'),
        ("episodes_stats.jsonl", '"count": [104]', '"count": [7]'),
    ):
        path = root / "meta" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    return root


def test_data_check_lists_what_is_wrong_and_fails_with_one_line(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli.main(["data", "check", str(broken)])
    out, err = capsys.readouterr()
    assert out.count("✗") == 3
    assert (out.count("fixes"), out.count("leaves out")) == (2, 1)
    assert "12 episodes: 10 intact, 1 fixable, 1 lost; 3 errors, 0 warnings." in out
    assert err == (
        f"error: {broken}: meta/info.json says total_frames 851 but meta/ lists 850; copy or download the dataset "
        "again (and 2 more above); write a copy of what can be kept with --fix OUT.\n"
    )


def test_data_check_with_only_warnings_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(shutil.copytree(LEROBOT / "lerobot_v30", tmp_path / "d"))
    (root / "meta" / "stats.json").unlink()
    cli.main(["data", "check", str(root)])
    out = capsys.readouterr().out
    assert "! │ all" in out
    assert "0 errors, 1 warning." in out


def test_data_check_fix_reports_what_it_left_out_and_fixed(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "clean"
    cli.main(["data", "check", str(broken), "--fix", str(out)])
    printed = capsys.readouterr().out
    assert f"Wrote {out}: 11 episodes; videos copied byte for byte." in printed
    assert "Left out: episode 3." in printed
    assert "Fixed: rows and episodes renumbered; statistics recomputed." in printed
    cli.main(["data", "check", str(out), "--frames"])
    assert "11 episodes: 11 intact, 0 fixable, 0 lost; 0 errors, 0 warnings." in capsys.readouterr().out


def test_data_check_refuses_to_write_over_anything(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, reason in ((broken.parent, "already exists"), (broken / "clean", "is inside")):
        with pytest.raises(SystemExit, match="1"):
            cli.main(["data", "check", str(broken), "--fix", str(place)])
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert reason in err


def test_data_check_lists_a_shared_problem_once_and_cuts_no_name(
    broken: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shutil.rmtree(broken / "data")
    (broken / "data/chunk-000").mkdir(parents=True)
    for name in ("episodes_stats.jsonl", "tasks.jsonl"):
        (broken / "meta" / name).write_text("")
    (broken / "meta" / "info.json").write_text(
        (broken / "meta" / "info.json").read_text().replace("episode_{episode_index:06d}.parquet", "one.parquet")
    )
    with pytest.raises(SystemExit, match="1"):
        cli.main(["data", "check", str(broken)])
    out, err = capsys.readouterr()
    assert out.count("0–11") == 1
    assert "…" not in out
    assert "12 episodes: 0 intact, 0 fixable, 12 lost; " in out
    assert "--fix" not in err


def test_data_check_lists_a_problem_of_several_files_once(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (4, 5):
        (broken / f"videos/chunk-000/observation.images.cam_high/episode_{number:06d}.mp4").unlink()
    with pytest.raises(SystemExit, match="1"):
        cli.main(["data", "check", str(broken)])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "missing" in line]
    assert "│ 3–5 " in row
    assert "cam_high/episode_000003.mp4 (and 2 more files) is missing; " in row


@pytest.mark.parametrize("generation", ["v21", "v30"])
def test_data_info_shows_what_a_dataset_contains(generation: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = LEROBOT / f"lerobot_{generation}"
    cli.main(["data", "info", str(root)])
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in out.splitlines()]
    facts = {row[0]: row[1] for row in rows if len(row) == 2}
    assert facts["episodes"] == "12, 850 frames at 50 fps: 17.0 s"
    columns = open_dataset(root).columns(["action", "next.success", "episode_index"])
    lengths = np.bincount(columns["episode_index"])
    assert facts["length"].startswith(f"{lengths.min()} to {lengths.max()} frames, median {np.median(lengths):g} (")
    succeeded = len(np.unique(columns["episode_index"][columns["next.success"]]))
    assert facts["success"].startswith(f"{succeeded} of 12: ")
    assert facts["cameras"] == "observation.images.cam_high 128×128"
    assert sum(row[0].startswith("action ") for row in rows if len(row) == 4) == 14
    low, high = columns["action"][:, 0].min(), columns["action"][:, 0].max()
    (first,) = [row for row in rows if len(row) == 4 and row[0].split(" (")[0] == "action 0"]
    assert (first[1], first[3]) == (f"{low:.4g}", f"{high:.4g}")


@pytest.mark.parametrize("args", [["data"], ["data", "--help"], ["data", "-h"]])
def test_data_alone_lists_its_commands(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert end.value.code == (2 if len(args) == 1 else 0)
    out = capsys.readouterr().out
    assert all(f"data {name}" in out for name in ("stats", "convert", "check", "show"))


def test_help_names_what_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["data", "show", "--help"])
    assert "DATASET EPISODE" in capsys.readouterr().out


def test_data_check_refuses_a_read_only_folder_before_the_work(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for out, reason in (
        (tmp_path / "new" / "clean", f"{tmp_path} is read-only; check its permissions"),
        (broken / "meta/info.json/clean", "is inside"),
    ):
        with pytest.raises(SystemExit, match="1"):
            cli.main(["data", "check", str(broken), "--fix", str(out)])
        printed, err = capsys.readouterr()
        assert printed == ""
        assert reason in err


@pytest.mark.parametrize("generation", ["v21", "v30"])
def test_data_show_draws_an_episode(generation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "5.png"
    cli.main(["data", "show", str(LEROBOT / f"lerobot_{generation}"), "5", "--out", str(out)])
    assert capsys.readouterr().out == f"Wrote {out}\n"
    with Image.open(out) as image:
        assert image.format == "PNG"
        assert image.size[0] == 1600
        assert image.size[1] > 1000


def test_data_show_needs_only_the_episodes_own_files(broken: Path, tmp_path: Path) -> None:
    (broken / "data/chunk-000/episode_000007.parquet").unlink()
    path = broken / "meta" / "info.json"
    path.write_text(path.read_text().replace("851", "850"))
    cli.main(["data", "show", str(broken), "5", "--columns", "2", "--out", str(tmp_path / "5.png")])
    assert (tmp_path / "5.png").exists()


def test_data_show_draws_the_readable_parts_of_a_broken_episode(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = broken / "videos/chunk-000/observation.images.cam_left_wrist/episode_000003.mp4"
    assert video.exists()
    video.write_bytes(b"no video")
    cli.main(["data", "show", str(broken), "3", "--columns", "2", "--out", str(tmp_path / "3.png")])
    err = " ".join(capsys.readouterr().err.split())
    assert "note: observation.images.cam_high: 2 of 2 images cannot be shown (" in err
    assert "note: observation.images.cam_left_wrist: 2 of 2 images cannot be shown (" in err
    assert "total_frames 851" in err
    assert (tmp_path / "3.png").exists()


def test_data_show_says_when_rows_or_actions_are_missing(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = broken / "data/chunk-000/episode_000005.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 10), path)
    args = ["data", "show", str(broken), "5", "--columns", "2", "--out", str(tmp_path / "5.png")]
    cli.main(args)
    err = " ".join(capsys.readouterr().err.split())
    assert f"has 10 rows of this episode, meta/ says {len(table)}." in err
    assert "There are no actions." not in err
    for change in (lambda: pq.write_table(table.drop_columns(["action"]), path), path.unlink):
        change()
        cli.main(args)
        assert "note: There are no actions." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["12"], "Episode 12 does not exist; "),
        (["0", "--columns", "0"], "--columns is 0"),
        (["0", "--out", "x.jpg"], "--out is x.jpg"),
        (["0", "--out", "no/such/x.png"], "--out is no/such/x.png and there is no folder no/such; create it"),
    ],
)
def test_data_show_refuses_with_one_line(args: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        cli.main(["data", "show", str(LEROBOT / "lerobot_v30"), *args])
    err = capsys.readouterr().err
    assert err.startswith(f"error: {reason}")
    assert err.count("\n") == 1
