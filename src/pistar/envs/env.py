"""What a simulator offers so that policies can act, be judged and learn in it; and where to find one by its name.

An environment here is a Gymnasium environment that can come back to where it began: start states have numbers, and the
same number is the same start to the bit. It speaks the robot's language: observations under the robot's names, actions
in its units. Nothing here knows of models, and nothing imports JAX: worker processes should start fast and stay small.
"""

import abc
import contextlib
import dataclasses
import difflib
import functools
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, Protocol, cast, runtime_checkable

import gymnasium
import numpy as np
from jaxtyping import Float, UInt8

from pistar.errors import UserError

Seen = dict[str, np.ndarray]
"""An observation: by the robot's names, without a batch."""

Ending = Literal["goes on", "success", "failure"]


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is known of an environment before anything moves."""

    name: str
    robot: str
    """Whose observations and actions these are, as `data.robots` names it."""
    instruction: str
    fps: int
    """Actions a second."""
    limit: int
    """Actions of an episode; then it is cut off, which is no failure."""
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    """What is executed at the utmost, in the robot's units. Infinite where the simulator takes anything."""
    train: range
    held_out: range
    """Numbers of start states, to learn from and to be judged by."""
    cameras: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """By name in the observation, height and width. Only what was asked for is rendered."""
    execute: int | None = None
    """Actions of a chunk its policies usually execute before they look again; None: all of them."""
    things: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """What a policy may be misled about to explore: of each thing the coordinates, of each coordinate the numbers of
    the state that are off by the same. Nothing: each number for itself."""
    drawn_by: str | None = None
    """What MuJoCo draws by (MUJOCO_GL) in the process that has built one; None where nothing is known of it."""

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise UserError(f"limit of {self.name} is {self.limit}; an episode has at least 1 step.")
        if set(self.train) & set(self.held_out):
            raise ValueError(f"{self.name} would be judged by start states it learns from")

    @property
    def action_dim(self) -> int:
        """Numbers in an action."""
        return len(self.action_low)

    def check_start(self, start_id: int) -> None:
        """Refuse a number nothing begins from."""
        if start_id not in self.train and start_id not in self.held_out:
            raise UserError(
                f"{self.name} has no start state {start_id}; to learn from there are {told(self.train)}, "
                f"to be judged by {told(self.held_out)}."
            )


def told(numbers: range) -> str:
    """A range in words."""
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) else "none"


@dataclasses.dataclass(frozen=True)
class Saved:
    """Where an episode is: how it began and what was done since. Exact for whatever is deterministic."""

    start_id: int
    actions: tuple[np.ndarray, ...]


class StartEnv(gymnasium.Env[Seen, np.ndarray], abc.ABC):
    """A simulator with start states one can come back to.

    To add one, write `_begin`, `_act` and `observe`, and `render` if there is something to look at; give it a `scene`.
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
        self._done: list[np.ndarray] = []

    @functools.cached_property
    def observation_space(self) -> gymnasium.Space[Any]:  # type: ignore[override]  # known once something was seen
        """Gymnasium's. Numbers may be anything; pictures have bytes."""
        if self._start_id is None:
            self._begin(self.scene.train[0])
        spaces: dict[str, gymnasium.Space[Any]] = {}
        for name, seen in self.observe().items():
            reach: Any = np.finfo(seen.dtype) if seen.dtype.kind == "f" else np.iinfo(seen.dtype)
            spaces[name] = gymnasium.spaces.Box(reach.min, reach.max, seen.shape, seen.dtype.type)
        return gymnasium.spaces.Dict(spaces)

    @abc.abstractmethod
    def _begin(self, start_id: int) -> None:
        """Set everything up as that start state has it, whatever happened before."""

    @abc.abstractmethod
    def _act(self, action: np.ndarray) -> Ending:
        """Do it, and see how things stand. Within the limits already."""

    @abc.abstractmethod
    def observe(self) -> Seen:
        """What the robot sees now. Changes nothing, and costs the cameras that were asked for."""

    def render(self) -> UInt8[np.ndarray, "h w 3"]:
        """A picture for people."""
        raise UserError(f"{self.scene.name} has nothing to look at; leave the video out.")

    def expert_action(self) -> Float[np.ndarray, " a"]:
        """What a script that knows how would do now."""
        raise _no_expert(self.scene.name)

    def begin(self, start_id: int) -> None:
        """Start an episode, without looking."""
        self.scene.check_start(start_id)
        self._begin(start_id)
        self._start_id, self._done = start_id, []

    def act(self, action: Float[np.ndarray, " a"]) -> tuple[Float[np.ndarray, " a"], Ending, bool]:
        """One step, without looking: what was executed after limits, how it ended, and whether time is up."""
        if self._start_id is None:
            raise RuntimeError("begin an episode first")
        action = np.asarray(action, np.float64)
        if action.shape != (self.scene.action_dim,):
            raise UserError(f"An action of {self.scene.name} has {self.scene.action_dim} numbers, not {action.shape}.")
        if not np.isfinite(action).all():
            raise ValueError(f"action {action} is not finite")
        executed = np.clip(action, self.scene.action_low, self.scene.action_high)
        ending = self._act(executed)
        self._done.append(executed)
        return executed, ending, ending == "goes on" and len(self._done) >= self.scene.limit

    def save(self) -> Saved:
        """Where it stands, to be taken up again here or in another process."""
        if self._start_id is None:
            raise RuntimeError("begin an episode first")
        return Saved(self._start_id, tuple(self._done))

    def restore(self, saved: Saved) -> None:
        """Stand there again. By doing all of it again: exact in every simulator, which their own states are not."""
        self.begin(saved.start_id)
        for action in saved.actions:
            self.act(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        """Gymnasium's: from `options["start_id"]`, or one of those to learn from, drawn."""
        super().reset(seed=seed)
        start_id = (options or {}).get("start_id")
        if start_id is None:
            start_id = self.scene.train[int(self.np_random.integers(len(self.scene.train)))]
        self.begin(start_id)
        return self.observe(), {"start_id": start_id, "success": False}

    def step(self, action: np.ndarray) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """Gymnasium's: the reward is 1 at success."""
        executed, ending, truncated = self.act(action)
        info = {"start_id": self._start_id, "success": ending == "success", "action": executed}
        return self.observe(), float(ending == "success"), ending != "goes on", truncated, info


@dataclasses.dataclass(frozen=True)
class EnvOptions:
    """How an environment is made, beside its name."""

    cameras: tuple[str, ...] | None = None
    """Which to render into observations, by the observation's names; None: those the robot's policies are used to."""
    image_size: int = 224
    """Height and width of what they see, before the model's own resizing."""
    shadows: bool = False
    """Shadows and reflections cost most of the rendering of some simulators."""
    limit: int | None = None
    """Steps of an episode; None: the benchmark's own."""

    def __post_init__(self) -> None:
        if self.image_size < 8:
            raise UserError(f"image_size is {self.image_size}; a camera has at least 8 pixels (try 224).")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit is {self.limit}; an episode has at least 1 step.")


@runtime_checkable
class Family(Protocol):
    """A module of environments: the tasks it has, and how one is made. Importing it must not import the simulator."""

    def tasks(self) -> Mapping[str, Sequence[str]]:
        """By name, what it stands for: itself, or the tasks of a suite."""

    def scene(self, task: str, options: EnvOptions) -> Scene:
        """What is known of one; where it can be, without making it."""

    def make(self, task: str, options: EnvOptions) -> StartEnv:
        """One environment."""


FAMILIES = {
    "aloha": "pistar.envs.aloha",
    "gymnasium": "pistar.envs.gymnasium_env",
    "libero": "pistar.envs.libero",
    "metaworld": "pistar.envs.metaworld",
}
"""Where environments come from, by the first part of their names."""
ENVIRONMENTS = 16
"""Side by side, where nobody says how many …"""
OF_A_WORKER = {"libero": 2}
"""… and no more than so many for each worker of a family whose simulators take a gigabyte each."""


def usual_environments(name: str, workers: int | None) -> int:
    """Side by side, where nobody says; over so many processes, as many as cores if None."""
    workers = len(os.sched_getaffinity(0)) if workers is None else max(workers, 1)
    return min(ENVIRONMENTS, workers * OF_A_WORKER.get(name.partition("/")[0], ENVIRONMENTS))


def _family(name: str) -> tuple[Family, str]:
    first, _, task = name.partition("/")
    if ":" in first:  # one's own: a module and what in it makes an environment
        module, _, maker = name.partition(":")
        try:
            return cast(Family, _Own(getattr(_import(module), maker), name)), name
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"Environment {name} cannot be had ({error}); it must be module:function of something importable."
            ) from error
    if first not in FAMILIES:
        raise UserError(f"There is no environment {name!r}; {nearest(first, FAMILIES)}")
    if first == "gymnasium" and ":" in task:  # its own idiom: a module that registers environments, and one of them
        module, _, task = task.partition(":")
        try:
            _import(module)
        except ImportError as error:
            raise UserError(
                f"Environment {name} cannot be had ({error}); {module} must be an importable module that registers it."
            ) from error
    return cast(Family, importlib.import_module(FAMILIES[first])), task


def _import(module: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # a script's own folder would be there, that of an installed command is another
        sys.path.append(os.getcwd())
    return importlib.import_module(module)


@dataclasses.dataclass(frozen=True)
class _Own:
    """A user's environment, as a family of one."""

    maker: Any
    name: str

    def tasks(self) -> Mapping[str, Sequence[str]]:
        return {self.name: [self.name]}

    def scene(self, task: str, options: EnvOptions) -> Scene:
        with contextlib.closing(self.make(task, options)) as made:
            return made.scene

    def make(self, task: str, options: EnvOptions) -> StartEnv:
        del task
        made: StartEnv = self.maker(options)
        if not isinstance(made, StartEnv):
            raise UserError(f"{self.name} made a {type(made).__name__}; it must make a pistar.envs.env.StartEnv.")
        return made


def find_tasks(name: str) -> list[str]:
    """The environments a name stands for: one, or all of a suite."""
    family, task = _family(name)
    known = family.tasks()
    if task not in known:
        first = name.partition("/")[0]
        raise UserError(f"{first} has no task {task!r}; {nearest(task, known)}")
    prefix = name[: len(name) - len(task)]
    return [f"{prefix}{each}" for each in known[task]]


def make_env(name: str, options: EnvOptions = EnvOptions()) -> StartEnv:  # noqa: B008  # frozen
    """The environment of that name, or an error with the nearest one."""
    family, task = _family(_only(name))
    return family.make(task, options)


def find_scene(name: str, options: EnvOptions = EnvOptions()) -> Scene:  # noqa: B008  # frozen
    """That of the environment of that name, which is built for it only where there is no other way to know."""
    family, task = _family(_only(name))
    return family.scene(task, options)


def check_expert(name: str) -> None:
    """Refuse a family none of whose environments has a scripted expert. Of others each must be asked."""
    family, _ = _family(name)
    found = [kind for kind in vars(family).values() if isinstance(kind, type) and issubclass(kind, StartEnv)]
    kinds = [kind for kind in found if kind is not StartEnv]
    if kinds and all(kind.expert_action is StartEnv.expert_action for kind in kinds):
        raise _no_expert(name)


def _no_expert(name: str) -> UserError:
    return UserError(f"{name} has no scripted expert; collect with --policy instead.")


def _only(name: str) -> str:
    (only, *others) = find_tasks(name)
    if others:
        raise UserError(f"{name} is {len(others) + 1} tasks; take one of them, as {only}.")
    return only


def nearest(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """A remedy for a misspelt name."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(list(known)[:12])}."


def missing(package: str, extra: str, error: ImportError) -> UserError:
    """What to install."""
    return UserError(f"{package} is not there ({error}); pip install 'pistar-rl[{extra}]'.")
