"""The interface of simulators, and how to find one by its name.

An environment is a Gymnasium environment with numbered start states: the same number gives the same start to the bit.
Observations have the robot's names and actions the robot's units. This module knows no models and does not import JAX,
so that worker processes start fast and stay small.
"""

import abc
import contextlib
import dataclasses
import difflib
import functools
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, Protocol, cast, runtime_checkable

import gymnasium
import numpy as np
from jaxtyping import Float, UInt8

from pistar.errors import UserError

RawObservation = dict[str, np.ndarray]
"""An observation as the robot names it, without a batch axis."""

EpisodeStatus = Literal["running", "success", "failure"]


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is known of an environment before its first episode."""

    name: str
    robot: str
    """The robot that observes and acts, as `data.robots` names it."""
    instruction: str
    fps: int
    """Actions per second."""
    limit: int
    """Most actions of an episode. An episode that reaches it is truncated, which is not a failure."""
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    """Limits that actions are clipped to, in the robot's units. Infinite where the simulator accepts any number."""
    train: range
    held_out: range
    """Numbers of the start states to train on and to evaluate on."""
    cameras: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Height and width of each camera that is rendered, by its name in the observation."""
    execute: int | None = None
    """Actions of a chunk that policies usually execute before they observe again. None means all of them."""
    state_noise_groups: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """What exploration by `state_noise` may shift. A group is an object, and its entries are coordinates, each given by
    the indices of the state that shift together. Empty: each index is a group of its own."""
    drawn_by: str | None = None
    """The backend MuJoCo renders with (MUJOCO_GL) in the process that built the environment; None if unknown."""

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise UserError(f"limit of {self.name} is {self.limit}; an episode has at least 1 step.")
        if set(self.train) & set(self.held_out):
            raise ValueError(f"{self.name} has start states that are both trained on and held out")

    @property
    def action_dim(self) -> int:
        """Numbers in an action."""
        return len(self.action_low)

    def check_start(self, start_id: int) -> None:
        """Refuse a number that is not a start state."""
        if start_id not in self.train and start_id not in self.held_out:
            raise UserError(
                f"{self.name} has no start state {start_id}; those to train on are {format_range(self.train)}, "
                f"those held out {format_range(self.held_out)}."
            )


def format_range(numbers: range) -> str:
    """Write a range as "0 to 9"."""
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) else "none"


@dataclasses.dataclass(frozen=True)
class EpisodeSnapshot:
    """A moment of an episode: its start state and the actions executed since. Exact in any deterministic simulator."""

    start_id: int
    actions: tuple[np.ndarray, ...]


class StartEnv(gymnasium.Env[RawObservation, np.ndarray], abc.ABC):
    """A simulator with numbered start states.

    To add one, write `_begin`, `_act` and `observe`, pass a `Scene`, and write `render` if there is something to show.
    """

    scene: Scene
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's own
    render_mode = "rgb_array"

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        low, high = np.array(scene.action_low, np.float32), np.array(scene.action_high, np.float32)
        self.action_space = gymnasium.spaces.Box(low, high, dtype=np.float32)
        self.metadata = {**self.metadata, "render_fps": scene.fps}
        self._start_id: int | None = None
        self._executed: list[np.ndarray] = []

    @functools.cached_property
    def observation_space(self) -> gymnasium.Space[Any]:  # type: ignore[override]  # known after a first observation
        """Gymnasium's observation space, unbounded within each array's dtype."""
        if self._start_id is None:
            self._begin(self.scene.train[0])
        spaces: dict[str, gymnasium.Space[Any]] = {}
        for name, values in self.observe().items():
            limits: Any = np.finfo(values.dtype) if values.dtype.kind == "f" else np.iinfo(values.dtype)
            spaces[name] = gymnasium.spaces.Box(limits.min, limits.max, values.shape, values.dtype.type)
        return gymnasium.spaces.Dict(spaces)

    @abc.abstractmethod
    def _begin(self, start_id: int) -> None:
        """Set up that start state. It must not depend on earlier episodes."""

    @abc.abstractmethod
    def _act(self, action: np.ndarray) -> EpisodeStatus:
        """Execute one action, already clipped to the limits, and say whether the episode is over."""

    @abc.abstractmethod
    def observe(self) -> RawObservation:
        """Return the current observation, with the requested cameras. Must not change the simulation."""

    def render(self) -> UInt8[np.ndarray, "h w 3"]:
        """Render an image for people."""
        raise UserError(f"{self.scene.name} cannot be rendered; leave the video out.")

    def expert_action(self) -> Float[np.ndarray, " a"]:
        """Return the action of a scripted expert."""
        raise _no_expert(self.scene.name)

    def begin(self, start_id: int) -> None:
        """Start an episode without observing."""
        self.scene.check_start(start_id)
        self._begin(start_id)
        self._start_id, self._executed = start_id, []

    def act(self, action: Float[np.ndarray, " a"]) -> tuple[Float[np.ndarray, " a"], EpisodeStatus, bool]:
        """Take one step without observing. Returns the clipped action, the status, and whether it is truncated."""
        if self._start_id is None:
            raise RuntimeError("begin an episode first")
        action = np.asarray(action, np.float64)
        if action.shape != (self.scene.action_dim,):
            raise UserError(f"An action of {self.scene.name} has {self.scene.action_dim} numbers, not {action.shape}.")
        if not np.isfinite(action).all():
            raise ValueError(f"action {action} is not finite")
        executed = np.clip(action, self.scene.action_low, self.scene.action_high)
        status = self._act(executed)
        self._executed.append(executed)
        return executed, status, status == "running" and len(self._executed) >= self.scene.limit

    def save(self) -> EpisodeSnapshot:
        """Save this moment of the episode. It can be restored here or in another process."""
        if self._start_id is None:
            raise RuntimeError("begin an episode first")
        return EpisodeSnapshot(self._start_id, tuple(self._executed))

    def restore(self, snapshot: EpisodeSnapshot) -> None:
        """Return to a saved moment by executing its actions again, which is exact; simulators' own states are not."""
        self.begin(snapshot.start_id)
        for action in snapshot.actions:
            self.act(action)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[RawObservation, dict[str, Any]]:
        """Reset, in Gymnasium's form: to `options["start_id"]`, or to a random start state to train on."""
        super().reset(seed=seed)
        start_id = (options or {}).get("start_id")
        if start_id is None:
            start_id = self.scene.train[int(self.np_random.integers(len(self.scene.train)))]
        self.begin(start_id)
        return self.observe(), {"start_id": start_id, "success": False}

    def step(self, action: np.ndarray) -> tuple[RawObservation, float, bool, bool, dict[str, Any]]:
        """Take a step, in Gymnasium's form. The reward is 1 at success, else 0."""
        executed, status, truncated = self.act(action)
        info = {"start_id": self._start_id, "success": status == "success", "action": executed}
        return self.observe(), float(status == "success"), status != "running", truncated, info


@dataclasses.dataclass(frozen=True)
class EnvOptions:
    """How an environment is made, besides its name."""

    cameras: tuple[str, ...] | None = None
    """Cameras to render into observations, by their names there. None renders those the robot's policies usually
    see."""
    image_size: int = 224
    """Height and width of camera images in pixels, before the model resizes them."""
    shadows: bool = False
    """Render shadows and reflections, which are most of the rendering cost of some simulators."""
    limit: int | None = None
    """Maximum number of steps per episode. None uses the benchmark's own limit."""

    def __post_init__(self) -> None:
        if self.image_size < 8:
            raise UserError(f"image_size is {self.image_size}; a camera has at least 8 pixels (try 224).")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit is {self.limit}; an episode has at least 1 step.")


@runtime_checkable
class Family(Protocol):
    """A module that makes environments of one simulator. Importing it must not import the simulator."""

    def tasks(self) -> Mapping[str, Sequence[str]]:
        """Return the tasks each name stands for: the task itself, or all tasks of a suite."""

    def scene(self, task: str, options: EnvOptions) -> Scene:
        """Describe a task, if possible without building it."""

    def make(self, task: str, options: EnvOptions) -> StartEnv:
        """Build an environment of a task."""


FAMILIES = {
    "aloha": "pistar.envs.suites.aloha",
    "gymnasium": "pistar.envs.suites.gymnasium",
    "libero": "pistar.envs.suites.libero",
    "metaworld": "pistar.envs.suites.metaworld",
}
"""Modules of environments, by the first part of an environment's name."""
DEFAULT_ENVIRONMENTS = 16
MAX_PER_WORKER = {"libero": 2}
"""Most environments per worker, for families whose simulators take about 1 GB each."""


def default_environment_count(name: str, workers: int | None) -> int:
    """Return how many environments run in parallel by default, with this many workers (None: one per core)."""
    workers = len(os.sched_getaffinity(0)) if workers is None else max(workers, 1)
    per_worker = MAX_PER_WORKER.get(name.partition("/")[0], DEFAULT_ENVIRONMENTS)
    return min(DEFAULT_ENVIRONMENTS, workers * per_worker)


def _find_family(name: str) -> tuple[Family, str]:
    """Return the family of an environment's name, and the rest of the name, which is the task."""
    first, _, task = name.partition("/")
    if ":" in first:  # the user's own: module:function
        module, _, function = name.partition(":")
        try:
            return cast(Family, _UserFamily(getattr(_import(module), function), name)), name
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"Environment {name} cannot be loaded ({error}); it must be module:function of something importable."
            ) from error
    if first not in FAMILIES:
        raise UserError(f"There is no environment {name!r}; {suggest_names(first, FAMILIES)}")
    if first == "gymnasium" and ":" in task:  # Gymnasium's idiom: a module that registers environments, and one of them
        module, _, task = task.partition(":")
        try:
            _import(module)
        except ImportError as error:
            raise UserError(
                f"Environment {name} cannot be loaded ({error}); {module} must be an importable module that registers "
                "it."
            ) from error
    return cast(Family, importlib.import_module(FAMILIES[first])), task


def _import(module: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # it is there when a script runs, but not for an installed command
        sys.path.append(os.getcwd())
    return importlib.import_module(module)


@dataclasses.dataclass(frozen=True)
class _UserFamily:
    """A user's own environment, as a family with one task."""

    function: Any
    name: str

    def tasks(self) -> Mapping[str, Sequence[str]]:
        return {self.name: [self.name]}

    def scene(self, task: str, options: EnvOptions) -> Scene:
        with contextlib.closing(self.make(task, options)) as env:
            return env.scene

    def make(self, task: str, options: EnvOptions) -> StartEnv:
        del task
        env: StartEnv = self.function(options)
        if not isinstance(env, StartEnv):
            raise UserError(f"{self.name} returned a {type(env).__name__}; it must return a pistar.envs.base.StartEnv.")
        return env


def find_tasks(name: str) -> list[str]:
    """List the environments a name stands for: one, or all of a suite."""
    family, task = _find_family(name)
    known = family.tasks()
    if task not in known:
        raise UserError(f"{name.partition('/')[0]} has no task {task!r}; {suggest_names(task, known)}")
    prefix = name[: len(name) - len(task)]
    return [f"{prefix}{each}" for each in known[task]]


def make_env(name: str, options: EnvOptions = EnvOptions()) -> StartEnv:  # noqa: B008  # frozen
    """Build the environment of that name. An unknown name is refused with the nearest known one."""
    family, task = _find_family(_single_task(name))
    return family.make(task, options)


def find_scene(name: str, options: EnvOptions = EnvOptions()) -> Scene:  # noqa: B008  # frozen
    """Describe the environment of that name. It is built only if its family cannot describe it otherwise."""
    family, task = _find_family(_single_task(name))
    return family.scene(task, options)


def check_expert(name: str) -> None:
    """Refuse a family without any scripted expert. In other families single tasks may still have none."""
    family, _ = _find_family(name)
    kinds = [kind for kind in vars(family).values() if isinstance(kind, type) and issubclass(kind, StartEnv)]
    kinds = [kind for kind in kinds if kind is not StartEnv]
    if kinds and all(kind.expert_action is StartEnv.expert_action for kind in kinds):
        raise _no_expert(name)


def _no_expert(name: str) -> UserError:
    return UserError(f"{name} has no scripted expert; collect with --policy instead.")


def _single_task(name: str) -> str:
    task, *others = find_tasks(name)
    if others:
        raise UserError(f"{name} is {len(others) + 1} tasks; name one of them, such as {task}.")
    return task


def select_cameras(
    owner: str, options: EnvOptions, known: Mapping[str, object] | Sequence[str], default: Iterable[str]
) -> tuple[str, ...]:
    """Return the cameras to render: those of the options, or the default. Refuses one that is not known."""
    cameras = tuple(default if options.cameras is None else options.cameras)
    for camera in cameras:
        if camera not in known:
            remedy = suggest_names(camera, known) if known else "it has none."
            raise UserError(f"{owner} has no camera {camera!r}; {remedy}")
    return cameras


def suggest_names(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """Suggest the nearest known names for a misspelt one."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(list(known)[:12])}."


def missing_package(package: str, extra: str, error: ImportError) -> UserError:
    """Say which extra to install."""
    return UserError(f"{package} is not installed ({error}); pip install 'pistar-rl[{extra}]'.")
