"""What a plan says, against what a run then really takes."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pistar import cli
from pistar.agents.acrlpd import Acrlpd
from pistar.config import AcrlpdConfig
from pistar.presets import get_config, with_lora
from pistar.training import plan as planning
from pistar.training.config import BcConfig, RLTrainConfig
from pistar.training.flops import count_flops
from pistar.training.memory import resident_bytes
from pistar.training.plan import Plan, abstract_batch, abstract_state, find_remedy, flops_by_part, state_bytes
from pistar.training.run import make_agent, prepare
from pistar.training.sharding import bytes_per_device, device_bytes, make_mesh
from small_run import small_run

GB = 10**9


@pytest.fixture
def config(tmp_path: Path) -> RLTrainConfig:
    return small_run(tmp_path / "runs", tmp_path / "cache", batch_size=8)


def shapes(tree: object) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, np.dtype(leaf.dtype)), tree)


@pytest.mark.parametrize("algorithm", ["acrlpd", "bc"])
def test_a_planned_batch_has_the_shapes_of_a_real_one(config: RLTrainConfig, algorithm: str) -> None:
    if algorithm == "bc":
        config = dataclasses.replace(config, algorithm=BcConfig())
    loader = prepare(config, dry=True).loader
    real = loader.sample_policy_batch(0) if algorithm == "bc" else loader.sample_batch(0)
    planned = abstract_batch(config, config.batch_size)
    assert jax.tree.leaves(shapes(planned)) == jax.tree.leaves(shapes(real))
    assert type(planned) is type(real)


@pytest.mark.parametrize("adapters", [False, True])
def test_planned_bytes_of_the_state_are_those_allocated(config: RLTrainConfig, adapters: bool) -> None:
    config = with_lora(config) if adapters else config
    agent, mesh = make_agent(config), make_mesh()
    planned = state_bytes(abstract_state(config, agent), mesh)
    assert isinstance(agent, Acrlpd)
    state = jax.jit(agent.init)(jax.random.key(0))
    assert sum(planned.values()) == pytest.approx(device_bytes(state), rel=0.02)
    assert planned["moments"] == pytest.approx(device_bytes(state.policy.optimizer), rel=0.02)
    assert ("frozen weights" in planned) == adapters


@pytest.mark.parametrize("change", [{}, {"gradient_accumulation": 2}, {"algorithm": BcConfig()}])
def test_the_parts_of_the_work_make_up_the_whole(config: RLTrainConfig, change: dict[str, Any]) -> None:
    config = dataclasses.replace(config, **change)
    parts, agent = flops_by_part(config), make_agent(config)
    batch: Any = abstract_batch(config, config.batch_size)
    whole = count_flops(agent.update, abstract_state(config, agent), batch, jax.random.key(0))
    assert sum(parts.values()) == pytest.approx(whole, rel=1e-3)
    assert all(part > 0 for part in parts.values())
    assert ("sampling" in parts) == isinstance(config.algorithm, AcrlpdConfig)
    assert ("prefix once more" in parts) == ("gradient_accumulation" in change)


PEAK = """
import sys
from pathlib import Path
import jax
from pistar.training.memory import resident_bytes
from pistar.training.plan import abstract_batch, abstract_state, scratch_bytes
from pistar.training.run import make_agent
from pistar.training.sharding import make_mesh
from small_run import small_run

config = small_run(Path("runs"), Path("cache"), batch_size=2048)
agent = make_agent(config)
state = jax.jit(agent.init)(jax.random.key(0))
batch = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), abstract_batch(config, config.batch_size))
update = jax.jit(agent.update).lower(state, batch, jax.random.key(0)).compile()
jax.block_until_ready((state, batch))
planned = scratch_bytes(config, make_mesh())
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
before, _ = resident_bytes()
jax.block_until_ready(update(state, batch, jax.random.key(1)))
print(planned, resident_bytes()[1] - before)
"""


def test_planned_activations_are_what_an_update_really_takes() -> None:
    if resident_bytes() == (0, 0):
        pytest.fail("this system does not tell how much memory a process takes")
    done = subprocess.run(
        [sys.executable, "-c", PEAK],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"},  # and else as for users
    )
    assert done.returncode == 0, done.stderr[-2000:]
    planned, taken = map(int, done.stdout.split())
    assert planned > 100e6, "too little to be measured"
    assert planned == pytest.approx(taken, rel=0.25)


# --- What would make it fit -------------------------------------------------------------------------------------------


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> list[RLTrainConfig]:
    """Compiling takes minutes at full size; this scratch is 2 GB for each row at a time, and the gradients."""
    asked: list[RLTrainConfig] = []

    def scratch(config: RLTrainConfig, mesh: jax.sharding.Mesh) -> int:
        asked.append(config)
        gradients = bytes_per_device(abstract_state(config, make_agent(config)).policy.trained, mesh)
        return 2 * GB * (config.batch_size // config.gradient_accumulation // mesh.size) + gradients

    monkeypatch.setattr(planning, "scratch_bytes", scratch)
    monkeypatch.setattr(planning, "audit_bytes", lambda *_: 0)
    monkeypatch.setattr(planning, "flops_by_part", lambda _: {})
    return asked


def remedy_for(memory: float, **changes: object) -> tuple[tuple[str, ...], Plan] | None:
    config = dataclasses.replace(get_config("rl_fold_box"), **changes)  # type: ignore[arg-type]
    first = planning.make_plan(config, make_mesh())
    assert not first.fits(memory * 1e9)
    found = find_remedy(config, memory * 1e9, lambda _: make_mesh(), with_lora)
    return None if found is None else (found.options, found.plan)


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        # 51.8 of state, 0.2 of batches and 13 of gradients leave 8.5 of the 73.6 to be filled: 4 rows.
        (80, ("--gradient-accumulation 32",)),
        # The smaller average gives back 6.5.
        (72, ("--algorithm.ema-dtype bfloat16", "--gradient-accumulation 64")),
        (62, ("--algorithm.ema-dtype bfloat16", "--policy-optimizer.moments bfloat16", "--gradient-accumulation 64")),
        (42, ("--algorithm.ema-dtype bfloat16", "--policy-optimizer.moments factored", "--gradient-accumulation 64")),
        (24, ("--lora", "--gradient-accumulation 32")),
    ],
)
def test_the_cheapest_levers_that_suffice_are_named(
    linear: list[RLTrainConfig], memory: float, options: tuple[str, ...]
) -> None:
    found = remedy_for(memory)
    assert found is not None
    assert found[0] == options
    assert found[1].fits(memory * 1e9)
    assert len(linear) <= 5, "each of these is a compilation"


def test_where_nothing_helps_nothing_is_named(linear: list[RLTrainConfig]) -> None:
    assert remedy_for(5) is None
    assert len(linear) == 1, "the state alone is too large: there is nothing to compile"


def test_named_options_are_ones_that_train_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lever of the ladder, as the command reads it, gives the config that was planned."""
    asked: list[RLTrainConfig] = []

    def train(config: RLTrainConfig, *_: object, **__: object) -> Path:
        asked.append(config)
        return Path(str(config.steps))

    monkeypatch.setattr("pistar.training.offline.train", train)
    preset = get_config("rl_fold_box")
    start = dataclasses.replace(
        preset, fsdp_devices=4, model=dataclasses.replace(preset.model, remat="dots", freeze=("vlm",))
    )
    given = ["--fsdp-devices", "4", "--model.remat", "dots", "--model.freeze", "vlm"]
    assert len(planning.ladder(start, with_lora)) == 9
    for levers in planning.ladder(start, with_lora):
        pulled = start
        for lever in levers:
            pulled = lever.pull(pulled)
        options = [word for lever in levers for word in lever.option.split()]
        cli.main(["train", "rl_fold_box", *given, *options])
        assert asked.pop() == pulled


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_tells_and_draws_for_devices_that_are_not_there(tmp_path: Path) -> None:
    program = "import sys; from pistar import cli; cli.main(sys.argv[1:])"
    command = ["plan", "debug_bc", "--devices", "2", "--device-memory", "1", "--out", str(tmp_path / "plan.svg")]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for words in ("debug_bc on 2 devices", "weights that train", "activations and gradients", "It fits into 1 GB"):
        assert words in done.stdout
    assert "<svg" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize(
    ("fits", "words"),
    [
        (24.0, "pistar train debug --batch-size 16 --seed=3 --lora --gradient-accumulation 4"),
        (0.0, "does not fit into 1 device of 24 GB"),
    ],
)
def test_the_command_says_what_would_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], fits: float, words: str
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    large = Plan({"moments": 30 * GB}, GB, GB, {"prefix": 10**12}, GB)
    small = dataclasses.replace(large, state={"moments": GB})
    monkeypatch.setattr(planning, "make_plan", lambda *_: large)
    remedy = planning.Remedy(("--lora", "--gradient-accumulation 4"), small) if fits else None
    monkeypatch.setattr(planning, "find_remedy", lambda *_, **__: remedy)
    own = ["--device-memory", "24", "--batch-size", "16", f"--out={tmp_path / 'plan.svg'}", "--seed=3"]
    command = ["plan", "debug", *own]
    if fits:
        cli.main(command)
        assert words in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit):
            cli.main(command)
        assert words in capsys.readouterr().err


def test_numbers_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "debug", "--devices", "0"])
    assert "--devices is 0" in capsys.readouterr().err
