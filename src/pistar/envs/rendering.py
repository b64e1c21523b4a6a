"""Pictures without a screen: which way to take, and whether what comes is one."""

import atexit
import functools
import importlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
from jaxtyping import UInt8

from pistar.errors import UserError

_PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom type="sphere" size=".2" rgba="1 0 0 1"/></worldbody></mujoco>'
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(data)
assert renderer.render().max() > 0
"""


NEVER = "disable"
"""Of MUJOCO_GL: no pictures."""


@functools.cache
def headless(*, required: bool = True) -> str:
    """Make MuJoCo render without a screen: by EGL, else in software. Best before MuJoCo is imported for the first time.

    A value of MUJOCO_GL somebody set is left alone. Tried in a process of its own: a failure would spoil this one.
    Where pictures are not `required` and there is no way to make any, it does without.
    """
    if chosen := os.environ.get("MUJOCO_GL"):
        return chosen
    reasons = []
    for backend in ("egl", "osmesa"):
        tried = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend},
            capture_output=True,
            text=True,
            check=False,
        )
        if tried.returncode == 0:
            os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend
            if "mujoco.gl_context" in sys.modules:  # imported before, it has chosen a screen
                importlib.reload(sys.modules["mujoco.gl_context"])
            return backend
        reasons.append(f"{backend}: {(tried.stderr.strip().splitlines() or ['no reason given'])[-1][:120]}")
    if not required:
        os.environ["MUJOCO_GL"] = NEVER
        return NEVER
    raise _cannot("; ".join(reasons))


def _cannot(reasons: str) -> UserError:
    return UserError(
        f"MuJoCo cannot render here ({reasons}); install libegl1 or libosmesa6 "
        "(apt-get install libegl1 libegl-mesa0 libosmesa6)."
    )


class PictureCheck:
    """Refuses what is certainly no view of a scene: one colour, or the noise of memory never drawn to.

    A camera whose first picture is none will give no others. If a later one is none, the episode can be run again.
    """

    def __init__(self, scene: str) -> None:
        self._scene = scene
        self._sound: set[str] = set()

    def __call__(self, camera: str, image: UInt8[np.ndarray, "h w 3"]) -> None:
        pixels = image.astype(np.int16)
        wrong = ""
        if pixels.std() < 1:
            wrong = "one colour only; set MUJOCO_GL to egl or osmesa and check the camera's name"
        # Neighbours in a picture are alike, unlike those in unwritten memory.
        elif np.abs(np.diff(pixels, axis=0)).mean() > 60 and np.abs(np.diff(pixels, axis=1)).mean() > 60:
            wrong = "noise; use one renderer in a process, or set MUJOCO_GL to osmesa"
        if wrong:
            kind = RuntimeError if camera in self._sound else UserError
            raise kind(f"Camera {camera} of {self._scene} renders {wrong}.")
        self._sound.add(camera)


class View:
    """MuJoCo's pictures of one kind of scene. One in a process: a second renderer has been seen to spoil both."""

    _only: "tuple[object, View] | None" = None

    def __init__(self, model: Any, size: tuple[int, int], shadows: bool) -> None:  # noqa: ANN401  # MuJoCo's
        import mujoco

        if os.environ.get("MUJOCO_GL") == NEVER:
            raise _cannot("neither by EGL nor in software")
        height, width = size
        model.vis.global_.offheight = max(height, model.vis.global_.offheight)
        model.vis.global_.offwidth = max(width, model.vis.global_.offwidth)
        if not shadows:
            # Most of the cost in software, and read when the renderer is made.
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        self._renderer = mujoco.Renderer(model, height, width)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._renderer.scene.flags[flag] = shadows

    @classmethod
    def of(cls, model: Any, scene: str, size: tuple[int, int], shadows: bool) -> "View":  # noqa: ANN401
        """The view of scenes of that name, whichever model of it is asked with."""
        key = (scene, size, shadows)
        if cls._only is None or cls._only[0] != key:
            cls.close_last()
            cls._only = (key, cls(model, size, shadows))
            # Before MuJoCo ends its driver, which it arranged just now: what is arranged last is done first.
            atexit.unregister(cls.close_last)
            atexit.register(cls.close_last)
        return cls._only[1]

    @classmethod
    def close_last(cls) -> None:
        """What is left of it, if anything."""
        last, cls._only = cls._only, None
        if last is not None:
            last[1].close()

    def picture(self, data: Any, camera: str) -> UInt8[np.ndarray, "h w 3"]:  # noqa: ANN401
        """What a camera sees."""
        self._renderer.update_scene(data, camera)
        drawn: np.ndarray = self._renderer.render()
        return drawn

    def close(self) -> None:
        """Give it back to the driver."""
        self._renderer.close()
