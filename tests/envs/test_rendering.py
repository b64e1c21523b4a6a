"""Which way pictures are drawn without a screen; and what is no picture of a scene is not taken for one."""

import ctypes.util
import os
import subprocess
import sys

import numpy as np
import pytest

from pistar.envs.rendering import PictureCheck
from pistar.errors import UserError

SCENE = np.add.outer(np.arange(32), np.arange(32))[..., None].repeat(3, axis=2).astype(np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
EMPTY = np.full((32, 32, 3), 7, np.uint8)


@pytest.mark.parametrize(("picture", "says"), [(EMPTY, "one colour only"), (NOISE, "renders noise")])
def test_a_camera_that_never_worked_is_the_users_and_one_that_breaks_is_the_episodes(
    picture: np.ndarray, says: str
) -> None:
    check = PictureCheck("a scene")
    check("left", SCENE)
    with pytest.raises(UserError, match=f"Camera right of a scene.*{says}"):
        check("right", picture)
    with pytest.raises(RuntimeError, match=f"Camera left of a scene.*{says}"):
        check("left", picture)
    check("left", SCENE)


def chosen(change: str = "", **environment: str) -> str:
    """What comes out in a process where nobody has chosen yet."""
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
    """By a probe that says so of itself: the machine of a test may have no OSMesa."""
    only = f"import os; assert os.environ['MUJOCO_GL'] == os.environ['PYOPENGL_PLATFORM'] == '{works}'"
    assert chosen(f'rendering._PROBE = "{only}"') == f"{works} {works} {works}"


def test_what_somebody_chose_is_left_alone() -> None:
    assert chosen("rendering._PROBE = 'nonsense'", MUJOCO_GL="glfw") == "glfw glfw None"


def test_the_probe_really_draws() -> None:
    """On a graphics card that is not there EGL fails; what is left is OSMesa, or a word on what to install."""
    told = chosen(MUJOCO_EGL_DEVICE_ID="99")
    if ctypes.util.find_library("OSMesa"):
        assert told == "osmesa osmesa osmesa"
    else:
        assert "MuJoCo cannot render here (egl: " in told
        assert "; osmesa: " in told
        assert "apt-get install libegl1 libegl-mesa0 libosmesa6" in told
        assert chosen("required = False", MUJOCO_EGL_DEVICE_ID="99") == "disable disable None"


def test_a_process_that_has_drawn_ends_without_a_word() -> None:
    program = "from pistar.envs.env import make_env; arm = make_env('metaworld/reach-v3'); arm.begin(0); arm.render()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
