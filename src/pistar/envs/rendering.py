"""Rendering without a screen: choosing a backend, sharing GPU memory among environments, and checking the images."""

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


DISABLED = "disable"
"""The value of MUJOCO_GL with which MuJoCo does not render."""


@functools.cache
def headless(*, required: bool = True) -> str:
    """Make MuJoCo render without a screen, by EGL or else in software. Best called before MuJoCo is first imported.

    A MUJOCO_GL that is already set is kept. Backends are tried in a separate process, because a failure would spoil
    this one. If no backend works and images are not `required`, rendering is disabled.
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
            if "mujoco.gl_context" in sys.modules:  # it chose a backend that needs a screen when it was imported
                importlib.reload(sys.modules["mujoco.gl_context"])
            return backend
        reasons.append(f"{backend}: {(tried.stderr.strip().splitlines() or ['no reason given'])[-1][:120]}")
    if not required:
        os.environ["MUJOCO_GL"] = DISABLED
        return DISABLED
    raise _cannot_render("; ".join(reasons))


def _cannot_render(reasons: str) -> UserError:
    return UserError(
        f"MuJoCo cannot render here ({reasons}); install libegl1 or libosmesa6 "
        "(apt-get install libegl1 libegl-mesa0 libosmesa6)."
    )


class ImageCheck:
    """Refuses images that cannot show a scene: one colour, or the noise of memory that was never drawn to.

    If a camera's first image is refused, the camera does not work, which is a `UserError`. If a later one is refused,
    the episode can be run again, so it is a `RuntimeError`.
    """

    def __init__(self, scene: str) -> None:
        self._scene = scene
        self._working: set[str] = set()

    def __call__(self, camera: str, image: UInt8[np.ndarray, "h w 3"]) -> None:
        pixels = image.astype(np.int16)
        wrong = ""
        if np.ptp(pixels, axis=(0, 1)).max() < 3:
            wrong = "one colour only; set MUJOCO_GL to egl or osmesa and check the camera's name"
        # Neighbouring pixels of an image are similar; in unwritten memory they are not.
        elif np.abs(np.diff(pixels, axis=0)).mean() > 60 and np.abs(np.diff(pixels, axis=1)).mean() > 60:
            wrong = "noise; use one renderer per process, or set MUJOCO_GL to osmesa"
        if wrong:
            kind = RuntimeError if camera in self._working else UserError
            raise kind(f"Camera {camera} of {self._scene} renders {wrong}.")
        self._working.add(camera)


def resize(image: UInt8[np.ndarray, "_ _ 3"], height: int, width: int) -> UInt8[np.ndarray, "_ _ 3"]:
    """Resize an image as OpenPI's clients do: with Pillow, bilinear, without padding."""
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image)
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))


class Graphics:
    """Draws one environment. Meshes and textures are loaded once per kind of scene and shared by its environments.

    All kinds and simulators share one OpenGL context per process: a second context has been seen to give noise.
    """

    _gl_context: ClassVar[Any] = None
    _loaded: ClassVar[dict[Hashable, "_Loaded"]] = {}

    def __init__(self, kind: Hashable) -> None:
        self._kind = kind
        self._free_before_driver_exit()  # dm_control registers the driver's exit when it is imported

    def draw(self, model: Any, scene: Any, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:  # noqa: ANN401
        """Draw MuJoCo's scene, bottom row first. The first call of a kind loads meshes and textures from `model`."""
        import mujoco

        if self._kind not in self._loaded:
            self._load(model)
        context = self._loaded[self._kind].context
        self._loaded[self._kind].users.add(self)
        self._gl_context.make_current()
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
        if os.environ.get("MUJOCO_GL") == DISABLED or not hasattr(mujoco.gl_context, "GLContext"):
            raise _cannot_render("neither by EGL nor in software")
        self._free_unused()
        if Graphics._gl_context is None:
            # Its size does not matter: everything is drawn offscreen.
            Graphics._gl_context = mujoco.gl_context.GLContext(64, 64)
            self._free_before_driver_exit()  # MuJoCo registers the driver's exit with its first context
        self._gl_context.make_current()
        context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        self._loaded[self._kind] = _Loaded(context)

    def close(self) -> None:
        """Stop drawing. The last environment of a kind frees its memory, and the last of all the OpenGL context."""
        if self._kind in self._loaded:
            self._loaded[self._kind].users.discard(self)
        self._free_unused()

    @classmethod
    def _free_before_driver_exit(cls) -> None:
        """Register `free_all` again: exit handlers run in reverse order, so it must come after the driver's."""
        atexit.unregister(cls.free_all)
        atexit.register(cls.free_all)

    @classmethod
    def free_all(cls) -> None:
        """Free everything in this process, also what is still in use."""
        for loaded in cls._loaded.values():
            loaded.users.clear()
        cls._free_unused()

    @classmethod
    def _free_unused(cls) -> None:
        """Free kinds without users, including those whose users were garbage-collected without `close`."""
        for kind, loaded in list(cls._loaded.items()):
            if not loaded.users:
                cls._gl_context.make_current()
                loaded.context.free()
                del cls._loaded[kind]
        if cls._gl_context is not None and not cls._loaded:
            cls._gl_context.free()
            cls._gl_context = None


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """A kind of scene in graphics memory, and who draws with it."""

    context: Any
    users: "weakref.WeakSet[Graphics]" = dataclasses.field(default_factory=weakref.WeakSet)


def capture(scene: Any, model: Any, data: Any, camera: str, options: Any) -> None:  # noqa: ANN401  # MuJoCo's
    """Fill a MuJoCo scene with what a fixed camera sees now. This costs little; `Graphics.draw` can draw it later."""
    import mujoco

    view = mujoco.MjvCamera()
    view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(camera).id
    mujoco.mjv_updateScene(model, data, options, None, view, mujoco.mjtCatBit.mjCAT_ALL, scene)


class Cameras:
    """The fixed cameras of one environment."""

    def __init__(self, model: Any, scene: str, shadows: bool) -> None:  # noqa: ANN401  # MuJoCo's
        import mujoco

        if not shadows:
            # Shadows are most of the cost in software, and anti-aliasing costs as much as the rest together. MuJoCo
            # reads both settings when a model is loaded.
            model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        self._model, self._check, self._graphics = model, ImageCheck(scene), Graphics((scene, shadows))
        self._options, self._scene = mujoco.MjvOption(), mujoco.MjvScene(model, maxgeom=1000)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = shadows

    def render(self, data: Any, name: str, height: int, width: int) -> UInt8[np.ndarray, "h w 3"]:  # noqa: ANN401
        """Render what a camera sees now, top row first."""
        capture(self._scene, self._model, data, name, self._options)
        image = self._graphics.draw(self._model, self._scene, height, width)
        self._check(name, image)
        return np.ascontiguousarray(image[::-1])

    def close(self) -> None:
        """Free graphics memory."""
        self._graphics.close()
