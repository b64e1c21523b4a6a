"""Choosing a backend to render without a screen, sharing graphics memory, and refusing images that show nothing."""

import ctypes.util
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pistar.envs.base import EnvOptions, StartEnv, make_env
from pistar.envs.rendering import Graphics, ImageCheck
from pistar.envs.vector.vector import Environments
from pistar.envs.vector.worker import Reset
from pistar.errors import UserError
from pistar.telemetry.memory import resident_bytes

from helpers.render_alone import render_alone

pytestmark = pytest.mark.usefixtures("models_compiled_once")
SCENE = np.add.outer(np.arange(32), np.arange(32))[..., None].repeat(3, axis=2).astype(np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
GREY = np.full((32, 32, 3), 7, np.uint8)
BLUE = np.full((32, 32, 3), (70, 120, 180), np.uint8)


@pytest.mark.parametrize(
    ("picture", "says"), [(GREY, "one colour only"), (BLUE, "one colour only"), (NOISE, "renders noise")]
)
def test_a_cameras_first_bad_image_is_a_user_error_and_a_later_one_a_runtime_error(
    picture: np.ndarray, says: str
) -> None:
    check = ImageCheck("a scene")
    check("left", SCENE)
    with pytest.raises(UserError, match=f"Camera right of a scene.*{says}"):
        check("right", picture)
    with pytest.raises(RuntimeError, match=f"Camera left of a scene.*{says}"):
        check("left", picture)
    check("left", SCENE)


def chosen(change: str = "", **environment: str) -> str:
    """Return what a process chooses in which nothing was chosen before."""
    bare = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    program = f"""
import os
from pistar.envs import rendering
required = True
{change}
print(rendering.headless(required=required), os.environ.get("MUJOCO_GL"), os.environ.get("PYOPENGL_PLATFORM"))
"""
    command, here = [sys.executable, "-c", program], {**bare, **environment}
    done = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("works", ["egl", "osmesa"])
def test_software_draws_where_egl_cannot(works: str) -> None:
    """With a probe that only looks at the variables, because the machine may have no OSMesa."""
    only = f"import os; assert os.environ['MUJOCO_GL'] == os.environ['PYOPENGL_PLATFORM'] == '{works}'"
    assert chosen(f'rendering._PROBE = "{only}"') == f"{works} {works} {works}"


def test_a_variable_that_is_set_is_kept() -> None:
    assert chosen("rendering._PROBE = 'nonsense'", MUJOCO_GL="glfw") == "glfw glfw None"


def test_the_probe_really_draws() -> None:
    """EGL fails on a graphics card that does not exist; then OSMesa is chosen, or an error says what to install."""
    told = chosen(MUJOCO_EGL_DEVICE_ID="99")
    if ctypes.util.find_library("OSMesa"):
        assert told == "osmesa osmesa osmesa"
    else:
        assert "MuJoCo cannot render here (egl: " in told
        assert "; osmesa: " in told
        assert "apt-get install libegl1 libegl-mesa0 libosmesa6" in told
        assert chosen("required = False", MUJOCO_EGL_DEVICE_ID="99") == "disable disable None"


REACH, DOOR, CUBE, PEG = "metaworld/reach-v3", "metaworld/door-open-v3", "aloha/transfer-cube", "aloha/insertion"


def begun(name: str, start_id: int = 3, **options: Any) -> StartEnv:
    env = make_env(name, EnvOptions(**options))
    env.begin(start_id)
    return env


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Free all graphics memory before and after, and list the models that are loaded into it."""
    import mujoco

    Graphics.free_all()
    made: list[Any] = []

    def noted(model: Any, *options: Any) -> Any:
        made.append(model)
        return context(model, *options)

    context = mujoco.MjrContext
    monkeypatch.setattr(mujoco, "MjrContext", noted)
    yield made
    Graphics.free_all()


def test_tasks_and_simulators_in_one_process_draw_in_turn_what_each_draws_alone(loads: list[Any]) -> None:
    """LIBERO is compared in its own tests, because building it takes seconds."""
    few = {"image_size": 48}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (REACH, {"cameras": ("images/corner2", "images/gripperPOV"), **few}),
        (DOOR, {"cameras": ("images/corner2",), "shadows": True, **few}),
        (CUBE, {"cameras": ("images/cam_high", "images/cam_left_wrist"), "image_size": 64}),
        (PEG, {"cameras": ("images/cam_high",), "shadows": True, **few}),
    ]
    alone = [render_alone(name, EnvOptions(**options), 3) for name, options in kinds]
    assert loads == []
    envs = [begun(name, **options) for name, options in kinds]
    for _ in range(2):
        for env, pictures in zip(envs, alone, strict=True):
            seen = {**env.observe(), "people": env.render()}
            for camera, picture in pictures.items():
                np.testing.assert_array_equal(seen[camera], picture, err_msg=f"{env.scene.name} {camera}")
    assert len(loads) == len(Graphics._loaded) == len(kinds)


@pytest.mark.parametrize("name", [REACH, CUBE])
def test_a_kind_of_scene_is_loaded_once_whatever_the_environment_and_the_size(name: str, loads: list[Any]) -> None:
    camera = {REACH: "images/topview", CUBE: "images/cam_high"}[name]
    small, large, other = (
        begun(name, at, cameras=(camera,), image_size=size) for at, size in ((3, 32), (3, 700), (4, 32))
    )
    before = small.observe()[camera], large.observe()[camera], other.observe()[camera]
    assert before[1].shape[1] == 700, "larger than what MuJoCo sets aside"
    assert not np.array_equal(before[0], before[2])
    for _ in range(2):
        small.render()
        for env, picture in zip((small, large, other), before, strict=True):
            np.testing.assert_array_equal(env.observe()[camera], picture)
    assert len(loads) == 1
    begun(name, cameras=(camera,), image_size=32, shadows=True).observe()
    assert len(loads) == 2, "with shadows it is another kind"


def test_the_last_environment_of_its_kind_frees_what_was_loaded(loads: list[Any]) -> None:
    first, second, other = begun(REACH, image_size=32), begun(REACH, image_size=32), begun(CUBE, image_size=32)
    for env in (first, second, other):
        env.render()
    window = Graphics._gl_context
    first.close()
    assert len(Graphics._loaded) == 2
    picture = second.render()
    second.close()
    second.close()  # a second time is harmless
    assert list(Graphics._loaded) == [(CUBE, False)]
    assert Graphics._gl_context is window
    other.close()
    assert (Graphics._loaded, Graphics._gl_context) == ({}, None)
    np.testing.assert_array_equal(second.render(), picture)  # loads again
    assert len(loads) == 3
    second.close()


def test_an_environment_that_was_not_closed_is_freed_once_it_is_collected(loads: list[Any]) -> None:
    forgotten, other = begun(REACH, image_size=32), begun(CUBE, image_size=32)
    forgotten.render()
    del forgotten
    gc.collect()
    other.observe()
    assert list(Graphics._loaded) == [(CUBE, False)]
    other.close()


def test_environments_of_this_process_are_closed_with_the_engine(loads: list[Any]) -> None:
    with Environments(REACH, EnvOptions(image_size=32), count=2, workers=0) as envs:
        envs.do({slot: Reset(slot, film=True) for slot in range(2)})
        assert len(Graphics._loaded) == len(loads) == 1
    assert (Graphics._loaded, Graphics._gl_context) == ({}, None)


def test_closed_scenes_leave_no_memory_in_use(loads: list[Any]) -> None:
    stays, comes = begun(DOOR, image_size=32), begun(REACH, image_size=32)
    taken = []
    for _ in range(8):
        stays.render()
        comes.render()
        comes.close()
        taken.append(resident_bytes()[0])
    assert len(loads) == 9
    assert taken[-1] - taken[1] < 1e8, "kept, each would take 40 MB"
    stays.close()


@pytest.mark.parametrize("chosen_by", ["us", "somebody before MuJoCo was imported"])
def test_where_nothing_can_be_drawn_every_simulator_says_what_to_install(
    chosen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Graphics.free_all()
    envs = begun(REACH), begun(CUBE, cameras=())
    if chosen_by == "us":
        monkeypatch.setenv("MUJOCO_GL", "disable")
    else:
        monkeypatch.delattr("mujoco.gl_context.GLContext")
    for env in envs:
        with pytest.raises(UserError, match=r"MuJoCo cannot render here .*apt-get install libegl1"):
            env.render()


ENDS = {
    "one that has drawn": f"arm = make_env('{REACH}'); arm.begin(0); arm.render()",
    "one whose environments were made before the first picture": f"""
arm, arms = make_env('{REACH}'), make_env('{CUBE}')
for each in (arms, arm):
    each.begin(0)
    each.render()
""",
    "one that takes in another simulator after it has drawn": f"""
arm = make_env('{REACH}')
arm.begin(0)
arm.render()
arms = make_env('{CUBE}')
""",
}


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_a_process_ends_without_output(program: str) -> None:
    """Everything is freed before the driver exits, whoever registered its exit and when."""
    program = f"from pistar.envs.base import make_env\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
