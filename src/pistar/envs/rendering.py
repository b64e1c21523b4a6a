"""Pictures without a screen: which way to take, what all simulators are drawn with, and whether what comes is one."""

import atexit
import dataclasses
import functools
import importlib
import os
import subprocess
import sys
import weakref
from collections.abc import Hashable
from typing import Any, ClassVar

import numpy as np
from jaxtyping import UInt8
from PIL import Image

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
        if np.ptp(pixels, axis=(0, 1)).max() < 3:
            wrong = "one colour only; set MUJOCO_GL to egl or osmesa and check the camera's name"
        # Neighbours in a picture are alike, unlike those in unwritten memory.
        elif np.abs(np.diff(pixels, axis=0)).mean() > 60 and np.abs(np.diff(pixels, axis=1)).mean() > 60:
            wrong = "noise; use one renderer in a process, or set MUJOCO_GL to osmesa"
        if wrong:
            kind = RuntimeError if camera in self._sound else UserError
            raise kind(f"Camera {camera} of {self._scene} renders {wrong}.")
        self._sound.add(camera)


def resize(image: UInt8[np.ndarray, "_ _ 3"], height: int, width: int) -> UInt8[np.ndarray, "_ _ 3"]:
    """As OpenPI's clients do: by Pillow, bilinear. To the same shape, so nothing is padded."""
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image)
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))


class Graphics:
    """What an environment draws with: of its kind of scene the meshes and textures, loaded once for all of that kind.

    They lie side by side, but there is one window in a process for all of them, whatever the simulator: a second one
    has been seen to give noise.
    """

    _window: ClassVar[Any] = None
    _loaded: ClassVar[dict[Hashable, "_Loaded"]] = {}

    def __init__(self, kind: Hashable) -> None:
        self._kind = kind
        self._end_before_the_driver()  # whose end dm_control arranges when it is imported

    def draw(self, model: Any, scene: Any, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:  # noqa: ANN401
        """MuJoCo's scene, the lowest row first. Loaded from that model if nobody else has; until `close`."""
        import mujoco

        if self._kind not in self._loaded:
            self._load(model)
        context = self._loaded[self._kind].context
        self._loaded[self._kind].users.add(self)
        self._window.make_current()
        if height > context.offHeight or width > context.offWidth:
            mujoco.mjr_resizeOffscreen(max(width, context.offWidth), max(height, context.offHeight), context)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)  # another kind's may be set
        image, whole = np.empty((height, width, 3), np.uint8), mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(whole, scene, context)
        mujoco.mjr_readPixels(image, None, whole, context)
        return image

    def _load(self, model: Any) -> None:  # noqa: ANN401
        import mujoco

        # robosuite overwrites the variable when it is imported, but MuJoCo has read it before.
        if os.environ.get("MUJOCO_GL") == NEVER or not hasattr(mujoco.gl_context, "GLContext"):
            raise _cannot("neither by EGL nor in software")
        self._give_back()
        if Graphics._window is None:
            # Of any size: nothing is drawn to the window itself.
            Graphics._window = mujoco.gl_context.GLContext(64, 64)
            self._end_before_the_driver()  # whose end MuJoCo arranges with the first window
        self._window.make_current()
        context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        self._loaded[self._kind] = _Loaded(context)

    def close(self) -> None:
        """The last of its kind to leave gives the memory back; the last of all, the window."""
        if self._kind in self._loaded:
            self._loaded[self._kind].users.discard(self)
        self._give_back()

    @classmethod
    def _end_before_the_driver(cls) -> None:
        """What is arranged last is done first."""
        atexit.unregister(cls.end)
        atexit.register(cls.end)

    @classmethod
    def end(cls) -> None:
        """Close all there are."""
        for loaded in cls._loaded.values():
            loaded.users.clear()
        cls._give_back()

    @classmethod
    def _give_back(cls) -> None:
        """What nobody uses any more; also of those who forgot to close."""
        for kind, loaded in list(cls._loaded.items()):
            if not loaded.users:
                cls._window.make_current()
                loaded.context.free()
                del cls._loaded[kind]
        if cls._window is not None and not cls._loaded:
            cls._window.free()
            cls._window = None


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """A kind of scene, and who draws with it."""

    context: Any
    users: "weakref.WeakSet[Graphics]" = dataclasses.field(default_factory=weakref.WeakSet)


class Cameras:
    """Those of an environment, which show it as it stands when they are asked."""

    def __init__(self, model: Any, scene: str, shadows: bool) -> None:  # noqa: ANN401  # MuJoCo's
        import mujoco

        if not shadows:
            # Most of the cost in software, and read when a model is loaded. Without smoothing of edges, too: it takes
            # as long again as all the rest.
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        self._model, self._check, self._graphics = model, PictureCheck(scene), Graphics((scene, shadows))
        self._shown, self._scene = mujoco.MjvOption(), mujoco.MjvScene(model, maxgeom=1000)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = shadows

    def picture(self, data: Any, name: str, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:  # noqa: ANN401
        """What one sees, the highest row first."""
        import mujoco

        camera = mujoco.MjvCamera()
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, self._model.camera(name).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._shown, None, camera, everything, self._scene)
        image = self._graphics.draw(self._model, self._scene, height, width)
        self._check(name, image)
        return np.ascontiguousarray(image[::-1])

    def close(self) -> None:
        """Give graphics memory back."""
        self._graphics.close()
