"""Any environment that is registered with Gymnasium and takes vectors of numbers as actions.

Gymnasium does not define success. Here an episode succeeds when the environment's `info` has a true `success` or
`is_success`. An episode that terminates without it is a failure, and one that the environment truncates is truncated.
Rewards are ignored.
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
from pistar.envs.base import EnvOptions, EpisodeStatus, RawObservation, Scene, StartEnv, select_cameras
from pistar.errors import UserError

SUCCESS_KEYS = ("success", "is_success")
"""Keys of `info` that may say that the episode succeeded."""
DEFAULT_FPS = 30


def tasks() -> Mapping[str, Sequence[str]]:
    """List all registered environments."""
    return {name: [name] for name in gymnasium.registry}


def scene(task: str, options: EnvOptions) -> Scene:
    """Describe an environment, which has to be built for it."""
    with contextlib.closing(make(task, options)) as env:
        return env.scene


def make(task: str, options: EnvOptions) -> "GymnasiumEnv":
    """Build the environment with that id."""
    name = f"gymnasium/{task}"
    try:
        env: gymnasium.Env[Any, Any] = gymnasium.make(
            task,
            max_episode_steps=options.limit,
            disable_env_checker=True,  # its warnings are for authors of environments
            render_mode=_render_mode(task),
        )
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(f"{name} cannot be built ({error}); install what it needs, or choose another.") from error
    return GymnasiumEnv(name, env, options)


class GymnasiumEnv(StartEnv):
    """Any environment of Gymnasium's. The number of the start state is the seed of its `reset`.

    Make it directly for an environment that is wrapped or not registered, with a robot and an instruction of your own.
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
        """Wrap an environment. The instruction defaults to its id, because Gymnasium has no instructions."""
        self._root = "image" if _is_image(env.observation_space) else "state"
        parts = _flatten(env.observation_space, self._root)
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
        self._parts = [part for part, space in parts.items() if part in cameras or not _is_image(space)]
        self._observation: Any = None
        self._truncated = False
        if cameras:
            _headless()

    def _begin(self, start_id: int) -> None:
        self._observation, _ = self._env.reset(seed=start_id)

    def _act(self, action: np.ndarray) -> EpisodeStatus:
        space = self._env.action_space
        self._observation, _, terminated, truncated, info = self._env.step(
            action.reshape(space.shape).astype(space.dtype)
        )
        self._truncated = bool(truncated)
        if any(info.get(key) for key in SUCCESS_KEYS):
            return "success"
        return "failure" if terminated else "running"

    def act(self, action: Float[np.ndarray, " a"]) -> tuple[Float[np.ndarray, " a"], EpisodeStatus, bool]:
        """Take one step. The episode is also truncated when the environment says so."""
        executed, status, truncated = super().act(action)
        return executed, status, status == "running" and (truncated or self._truncated)

    def observe(self) -> RawObservation:
        """Return numbers as vectors, and images as they are."""
        parts = _flatten(self._observation, self._root)
        return {
            part: np.array(parts[part]) if part in self.scene.cameras else np.array(parts[part], np.float32).reshape(-1)
            for part in self._parts
        }

    def render(self) -> UInt8[np.ndarray, "h w 3"]:
        """Render the environment's own view."""
        if self._env.render_mode != "rgb_array":
            return super().render()
        _headless()
        try:
            image = self._env.render()
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(f"{self.scene.name} cannot be rendered ({error}); leave the video out.") from error
        return np.array(image, np.uint8)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _flatten(tree: Any, root: str) -> dict[str, Any]:  # noqa: ANN401  # spaces, or values of them
    """Flatten nested dictionaries to paths with slashes. What is not a dictionary is called `root`."""
    if not isinstance(tree, Mapping):  # Gymnasium's Dict space is a Mapping, too
        return {root: tree}
    flat: dict[str, Any] = {}
    for key, part in tree.items():
        below = _flatten(part, "")
        flat |= {f"{key}/{path}" if path else str(key): leaf for path, leaf in below.items()}
    return flat


def _is_image(space: gymnasium.Space[Any]) -> bool:
    shape = space.shape or ()
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(shape) == 3 and shape[2] == 3


def _cameras(name: str, parts: Mapping[str, gymnasium.Space[Any]], options: EnvOptions) -> dict[str, tuple[int, int]]:
    """Return the sizes of the requested images; of all images by default."""
    sizes = {}
    for part, space in parts.items():
        if _is_image(space):
            assert space.shape is not None
            sizes[part] = (space.shape[0], space.shape[1])
        elif not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            raise UserError(f"{name} observes {space} ({part}), which is not an array; wrap it to leave that out.")
    return {camera: sizes[camera] for camera in select_cameras(name, options, sizes, sizes)}


def _action_limits(name: str, space: gymnasium.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UserError(
            f"{name} takes actions of {space}, but policies return vectors of real numbers (a Box of floats); choose "
            "another environment, or wrap it."
        )
    return space.low.reshape(-1), space.high.reshape(-1)


def _fps(env: gymnasium.Env[Any, Any]) -> int:
    """Return the rate it is rendered at, or else the rate it steps at."""
    seconds = getattr(env.unwrapped, "dt", None) or 1 / DEFAULT_FPS
    return max(1, round(env.metadata.get("render_fps") or 1 / seconds))


def _limit(name: str, env: gymnasium.Env[Any, Any], options: EnvOptions) -> int:
    limit = options.limit or (env.spec.max_episode_steps if env.spec is not None else None)
    if limit is None:
        raise UserError(f"{name} has no limit on its episodes; set one (--limit 500).")
    return limit


def _render_mode(task: str) -> str | None:
    entry_point = gymnasium.spec(task).entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    metadata = getattr(creator, "metadata", None)
    can_render = isinstance(metadata, Mapping) and "rgb_array" in (metadata.get("render_modes") or ())
    return "rgb_array" if can_render else None


def _headless() -> None:
    """Make MuJoCo render without a screen, if the environment uses MuJoCo."""
    if "mujoco" in sys.modules:
        rendering.headless()
