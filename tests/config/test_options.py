"""Options of `pistar train PRESET`: few enough to read, each with a description; the other settings are YAML only."""

import contextlib
import dataclasses
import functools
import io
import itertools
import re
from collections.abc import Iterator

import pytest

from pistar.cli import main as cli
from pistar.config.presets import PRESETS, get_config
from pistar.config.train import is_yaml_only

CEILINGS = {"bc": 60, "rl": 110, "ript": 115, "acrlpd_online": 135}
"""The most options that `pistar train PRESET --help` may show, by family of presets."""


def family(preset: str) -> str:
    """debug_bc imitates; the other presets without a family's name are ACRLPD from data."""
    return "bc" if preset == "debug_bc" else next((name for name in CEILINGS if preset.startswith(f"{name}_")), "rl")


@functools.cache
def help_text(preset: str, command: str = "train") -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as stopped:
        cli.main([command, preset, "--help"])
    assert stopped.value.code == 0
    return printed.getvalue()


def descriptions(preset: str) -> dict[str, str]:
    """Every option of a setting, and the text below it up to the next option or the end of its box."""
    found: dict[str, list[str]] = {}
    option = None
    _, _, text = help_text(preset).partition("[OPTIONS]")
    for line in text.splitlines():
        inner = line.strip(" │|")
        if named := re.match(r"(?:-h, )?--([a-z][\w.-]*)", inner):
            option = named[1]
            found[option] = []
        elif re.fullmatch(r"([╭╰─+-].*)?", inner):
            option = None
        elif option is not None:
            found[option].append(inner)
    return {option: " ".join(lines) for option, lines in found.items() if option != "help"}


def command_descriptions(command: str) -> dict[str, str]:
    """The command's own arguments, which come before a preset's settings, and the text of each."""
    text = help_text("debug", command).partition("[OPTIONS]")[0].partition("positional arguments:")[2]
    found: dict[str, str] = {}
    for block in re.findall(r"^  \S.*(?:\n {3,}.*)*", text, re.MULTILINE):
        named = re.match(r"  (preset|--[a-z-]+)(?: \[?[A-Z][\w.:=,]*\]?)?(?:\s{2,}|\n\s+)", block)
        assert named, block
        found[named[1]] = " ".join(block[named.end() :].split())
    return found


def settings_of(config: object, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings that are no tables."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


@pytest.mark.parametrize("preset", PRESETS)
def test_a_presets_options_are_few_enough_to_read(preset: str) -> None:
    options = set(re.findall(r"--[a-z][\w.-]*", help_text(preset)))
    assert 30 < len(options) <= CEILINGS[family(preset)]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_option_has_a_description_that_is_a_sentence(preset: str) -> None:
    for option, text in descriptions(preset).items():
        assert re.fullmatch(r"[A-Zπ].*\. \(default: .*\)", text), f"--{option}: {text!r}"


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (
            "train",
            {"--resume", "--overwrite", "--dry-run", "--debug", "--distributed", "--coordinator", "--hosts", "--host"},
        ),
        ("plan", {"--devices", "--device-memory", "--out"}),
        ("sweep", {"--param", "--seeds", "--metric"}),
    ],
)
def test_every_option_of_the_command_has_a_description_that_is_a_sentence(command: str, own: set[str]) -> None:
    described = command_descriptions(command)
    assert described.keys() == own | {"preset", "--config", "--lora"}
    for option, text in described.items():
        assert re.fullmatch(r"[A-Z].*\.", text), f"{option}: {text!r}"


def test_help_lines_break_only_where_they_are_full() -> None:
    """tyro would keep the line breaks of the source."""
    lines = help_text("acrlpd_online_metaworld").partition("[OPTIONS]")[2].splitlines()
    inner = [line.strip("│").rstrip() for line in lines]
    width = max(map(len, inner))
    for line, after in itertools.pairwise(inner):
        if line.startswith("       ") and after.startswith("       "):
            assert len(line) + 1 + len(after.split()[0]) > width - 2, line


@pytest.mark.parametrize("preset", PRESETS)
def test_every_setting_is_an_option_or_yaml_only(preset: str) -> None:
    config = get_config(preset)
    options = {option.replace("-", "_").replace(".no_", ".") for option in descriptions(preset)}
    assert options == {name for name in settings_of(config) if not is_yaml_only(config, name)}


OPTIMIZERS = ("policy_optimizer", "algorithm.critic_optimizer")
YAML_ONLY = {
    "name": "mine",
    "updates_per_dispatch": "2",
    "data.stride": "2",
    "data.cache_dir": "here",
    "data.pool": "none",
    "data.pool.episodes": "4",
    "model.action_dim": "16",
    "model.vocab_size": "100",
    "model.image_size": "56",
    "model.cameras": "base_0_rgb",
    "model.vlm.width": "64",
    "model.expert.lora.rank": "4",
    "model.vision.patch_size": "7",
    "policy_optimizer.b1": "0.8",
    "policy_optimizer.b2": "0.8",
    "policy_optimizer.eps": "1e-6",
    "algorithm.critic_optimizer.b2": "0.8",
    "online.limit": "5",
    "online.health.max_drift": "none",
}


@pytest.mark.parametrize("name", YAML_ONLY)
@pytest.mark.parametrize("equals", [False, True], ids=["apart", "with ="])
def test_settings_that_are_yaml_only_are_refused_with_the_remedy(
    name: str, equals: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    option, value = "--" + name.replace("_", "-"), YAML_ONLY[name]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "debug", *((f"{option}={value}",) if equals else (option, value))])
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {option}")
    assert f"write {name} into a YAML file and give it as --config FILE" in line


@pytest.mark.parametrize("name", ["online.limits", "online.health.max_drfit", "seeed", "steps", "seed.x", "data.pol"])
def test_names_that_do_not_exist_and_options_are_not_yaml_only(name: str) -> None:
    assert not is_yaml_only(get_config("debug"), name)


def test_these_settings_are_yaml_only_and_no_others() -> None:
    debug = get_config("debug")
    hidden = {name for name in settings_of(debug) if is_yaml_only(debug, name)}
    optimizers = {f"{name}.{field}" for name in OPTIMIZERS for field in ("b1", "b2", "eps")}
    sizes = {f"model.{field}" for field in ("action_dim", "vocab_size", "image_size", "cameras")}
    parts = {name for name in hidden if name.startswith(("model.vlm.", "model.expert.", "model.vision."))}
    run = {"name", "updates_per_dispatch", "online", "data.stride", "data.cache_dir", "data.pool"}
    assert hidden == optimizers | sizes | parts | run
