"""Whatever is registered with Gymnasium and is acted on by a vector of numbers.

Gymnasium does not know success. An episode succeeds when the environment's `info` has a true `success` or `is_success`;
one that terminates without is a failure, and one the environment truncates is cut off. Rewards are not looked at.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from jaxtyping import Float, UInt8

from pistar.envs import rendering
from pistar.envs.env import Ending, EnvOptions, Scene, Seen, StartEnv, nearest
from pistar.errors import UserError

FLAGS = ("success", "is_success")
"""Where an environment's `info` may say that it is done."""
FPS = 30
"""Where an environment does not say."""


def tasks() -> Mapping[str, Sequence[str]]:
    """All that are registered, each for itself."""
    return {name: [name] for name in gymnasium.registry}


def scene(task: str, options: EnvOptions) -> Scene:
    """Of one of them, which must be made for it."""
    with contextlib.closing(make(task, options)) as made:
        return made.scene


def make(task: str, options: EnvOptions) -> "GymnasiumEnv":
    """One of them, by its id."""
    name = f"gymnasium/{task}"
    try:
        env: gymnasium.Env[Any, Any] = gymnasium.make(
            task,
            max_episode_steps=options.limit,
            disable_env_checker=True,  # its warnings are for who writes environments
            render_mode=_render_mode(task),
        )
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(f"{name} cannot be made ({error}); install what it needs, or choose another.") from error
    return GymnasiumEnv(name, env, options)


class GymnasiumEnv(StartEnv):
    """Any environment of Gymnasium's. The start state is what its `reset` makes of a seed, the state's number.

    Made directly for environments that are not registered, or wrapped; with a robot and words of their own.
    """

    def __init__(
        self,
        name: str,
        env: gymnasium.Env[Any, Any],
        options: EnvOptions,
        *,
        robot: str = "gymnasium",
        instruction: str | None = None,
    ) -> None:
        """The instruction is the id if left out: Gymnasium has no words for what is to be done."""
        self._root = "image" if _is_picture(env.observation_space) else "state"
        parts = _flat(env.observation_space, self._root)
        cameras = _cameras(name, parts, options)
        low, high = _action_limits(name, env.action_space)
        super().__init__(
            Scene(
                name=name,
                robot=robot,
                instruction=instruction or name.removeprefix("gymnasium/"),
                fps=_fps(env),
                limit=_limit(name, env, options),
                action_low=tuple(low.tolist()),
                action_high=tuple(high.tolist()),
                train=range(10_000),
                held_out=range(1_000_000, 1_010_000),
                cameras=cameras,
            )
        )
        self._env = env
        self._parts = [part for part, space in parts.items() if part in cameras or not _is_picture(space)]
        self._now: Any = None
        self._cut_off = False
        if cameras:
            _headless()

    def _begin(self, start_id: int) -> None:
        self._now, _ = self._env.reset(seed=start_id)

    def _act(self, action: np.ndarray) -> Ending:
        space = self._env.action_space
        self._now, _, terminated, truncated, told = self._env.step(action.reshape(space.shape).astype(space.dtype))
        self._cut_off = bool(truncated)
        if any(told.get(flag) for flag in FLAGS):
            return "success"
        return "failure" if terminated else "goes on"

    def act(self, action: Float[np.ndarray, " a"]) -> tuple[Float[np.ndarray, " a"], Ending, bool]:
        """As any; time is also up when the environment says so."""
        executed, ending, time_is_up = super().act(action)
        return executed, ending, ending == "goes on" and (time_is_up or self._cut_off)

    def observe(self) -> Seen:
        """Numbers as vectors; pictures as they come."""
        flat = _flat(self._now, self._root)
        return {
            part: np.array(flat[part]) if part in self.scene.cameras else np.array(flat[part], np.float32).reshape(-1)
            for part in self._parts
        }

    def render(self) -> UInt8[np.ndarray, "h w 3"]:
        """As the environment draws itself."""
        if self._env.render_mode != "rgb_array":
            return super().render()
        _headless()
        try:
            drawn = self._env.render()
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(f"{self.scene.name} cannot be drawn ({error}); leave the video out.") from error
        return np.array(drawn, np.uint8)

    def close(self) -> None:
        """Let go of what it holds."""
        self._env.close()


def _flat(tree: Any, root: str) -> dict[str, Any]:  # noqa: ANN401  # spaces, or what is in them
    """By slash paths; by `root` what is no dictionary."""
    if not isinstance(tree, Mapping):  # which Gymnasium's space of dictionaries is one of, too
        return {root: tree}
    flat: dict[str, Any] = {}
    for key, part in tree.items():
        below = _flat(part, "")
        flat |= {f"{key}/{path}" if path else str(key): leaf for path, leaf in below.items()}
    return flat


def _is_picture(space: gymnasium.Space[Any]) -> bool:
    shape = space.shape or ()
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(shape) == 3 and shape[2] == 3


def _cameras(name: str, parts: Mapping[str, gymnasium.Space[Any]], options: EnvOptions) -> dict[str, tuple[int, int]]:
    """The pictures that were asked for, all if nobody said, and their sizes."""
    sizes = {}
    for part, space in parts.items():
        if _is_picture(space):
            assert space.shape is not None
            sizes[part] = (space.shape[0], space.shape[1])
        elif not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise UserError(f"{name} observes {space} ({part}), which is no array; wrap it to leave that out.")
    for camera in options.cameras or ():
        if camera not in sizes:
            raise UserError(f"{name} has no camera {camera!r}; {nearest(camera, sizes) if sizes else 'it has none.'}")
    return sizes if options.cameras is None else {camera: sizes[camera] for camera in options.cameras}


def _action_limits(name: str, space: gymnasium.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UserError(
            f"{name} is acted on by {space}; policies here give vectors of real numbers, a Box of floats: "
            "choose another environment, or wrap it."
        )
    return space.low.reshape(-1), space.high.reshape(-1)


def _fps(env: gymnasium.Env[Any, Any]) -> int:
    """The rate it is shown at, else the one it steps at."""
    seconds = getattr(env.unwrapped, "dt", None) or 1 / FPS
    return max(1, round(env.metadata.get("render_fps") or 1 / seconds))


def _limit(name: str, env: gymnasium.Env[Any, Any], options: EnvOptions) -> int:
    limit = options.limit or (env.spec.max_episode_steps if env.spec is not None else None)
    if limit is None:
        raise UserError(f"{name} has no limit to its episodes; set one (--limit 500).")
    return limit


def _render_mode(task: str) -> str | None:
    made_by = gymnasium.spec(task).entry_point
    creator = load_env_creator(made_by) if isinstance(made_by, str) else made_by
    told = getattr(creator, "metadata", None)
    known = isinstance(told, Mapping) and "rgb_array" in (told.get("render_modes") or ())
    return "rgb_array" if known else None


def _headless() -> None:
    """Where it is MuJoCo that draws."""
    if "mujoco" in sys.modules:
        rendering.headless()
