"""A process that holds simulators: told what to do through a pipe, it answers there, and with pictures beside it.

It is started anew, not forked, and knows nothing of models.
"""

import dataclasses
import importlib
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from pistar.envs.env import Ending, EnvOptions, Scene, Seen, StartEnv
from pistar.envs.pool import Pool
from pistar.errors import UserError

Behaviour = Callable[[], np.ndarray]
"""Acts by itself, inside the worker. Knows its environment and its random numbers."""


@dataclasses.dataclass(frozen=True)
class Script:
    """Who acts where no policy does: `make(env, rng, **options)` gives a `Behaviour` for an episode."""

    make: str
    """module:function"""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def behaviour(self, env: StartEnv, start_id: int) -> Behaviour:
        """Of one episode; its random numbers are its start's."""
        module, _, function = self.make.partition(":")
        made: Behaviour = getattr(importlib.import_module(module), function)(
            env, np.random.default_rng([self.seed, start_id]), **self.options
        )
        return made


@dataclasses.dataclass(frozen=True)
class Begin:
    """Start an episode and look."""

    start_id: int
    script: Script | None = None
    film: bool = False
    """Whether people want to see this episode."""
    task: str | None = None
    """The environment's name; None: the first there is."""


@dataclasses.dataclass(frozen=True)
class Go:
    """Act, until these actions are done or the episode is over."""

    actions: Float[np.ndarray, "k a"] | int
    """Or how many the script is to choose."""
    look: bool
    """After every step, or only after the last."""


@dataclasses.dataclass(frozen=True)
class Went:
    """What came of it."""

    seen: Mapping[str, np.ndarray]
    """`[n, ...]` after every step, or `[1, ...]` after the last."""
    actions: Float[np.ndarray, "n a"]
    """As executed. None for a beginning."""
    ending: Ending = "goes on"
    truncated: bool = False
    film: tuple[UInt8[np.ndarray, "h w 3"], ...] = ()
    seconds: float = 0.0
    """Of a processor it took."""


LOST = "lost"


@dataclasses.dataclass(frozen=True)
class Fault:
    """It could not be done, by no fault of the policy."""

    kind: str
    """raised, not finite, died, hung; or `LOST`, with a worker that died or hung at another episode"""
    detail: str


@dataclasses.dataclass(frozen=True)
class Crew:
    """What a worker is to hold."""

    names: Sequence[str]
    """Of the tasks it may be told to begin."""
    options: EnvOptions
    slots: int
    spare: int = 0
    """Environments kept beyond one for each slot."""
    asked: Sequence[str] = ()
    """Tasks whose scenes it is to tell."""


class Simulators:
    """Environments side by side in this process, each of the task it was last told to begin."""

    def __init__(self, crew: Crew) -> None:
        self._first, *others = crew.names
        self._pool = Pool(crew.options, crew.slots, crew.spare)
        self._scripts: dict[int, Behaviour] = {}
        self._films: set[int] = set()
        # Of one task all will be needed; of several nobody knows yet which.
        self.scenes: dict[str, Scene] = (
            {name: self._pool.scene(name) for name in crew.asked}
            if others
            else {self._first: dataclasses.replace(self._pool.fill(self._first), drawn_by=_drawn_by())}
        )

    def obey(self, slot: int, command: Begin | Go) -> Went | Fault | UserError:
        """Do it. What goes wrong inside is an answer; that environment is not used again."""
        since = time.process_time()
        try:
            went = self._begin(slot, command) if isinstance(command, Begin) else self._go(slot, command)
        except UserError as error:
            self._pool.drop(slot)
            return error
        except Exception as error:  # a simulator may raise anything
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._pool.drop(slot)
            return Fault(
                "raised", f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
            )
        broken = [name for name, values in went.seen.items() if not np.isfinite(values).all()]
        if broken:
            self._pool.drop(slot)  # what is NaN inside may outlive a new beginning
            return Fault("not finite", f"observation {broken[0]} has NaN or Inf")
        if went.ending != "goes on" or went.truncated:
            self._pool.leave(slot)
        return dataclasses.replace(went, seconds=time.process_time() - since)

    def _begin(self, slot: int, begin: Begin) -> Went:
        env = self._pool.take(slot, begin.task or self._first)
        env.begin(begin.start_id)
        self._scripts.pop(slot, None)
        if begin.script is not None:
            self._scripts[slot] = begin.script.behaviour(env, begin.start_id)
        self._films.discard(slot)
        if begin.film:
            self._films.add(slot)
        film = (env.render(),) if begin.film else ()
        return Went(_stack([env.observe()]), np.zeros((0, env.scene.action_dim)), film=film)

    def _go(self, slot: int, go: Go) -> Went:
        env = self._pool.held(slot)
        seen: list[Seen] = []
        done: list[np.ndarray] = []
        film: list[np.ndarray] = []
        steps = go.actions if isinstance(go.actions, int) else len(go.actions)
        ending: Ending = "goes on"
        truncated = False
        for step in range(steps):
            action = self._scripts[slot]() if isinstance(go.actions, int) else go.actions[step]
            executed, ending, truncated = env.act(action)
            done.append(executed)
            over = ending != "goes on" or truncated or step == steps - 1
            if go.look or over:
                seen.append(env.observe())
            if slot in self._films:
                film.append(env.render())
            if over:
                break
        return Went(_stack(seen), np.stack(done), ending, truncated, tuple(film))

    def close(self) -> None:
        """Where they are in a process that goes on without them."""
        self._pool.close()


def _drawn_by() -> str | None:
    return os.environ.get("MUJOCO_GL") if "mujoco" in sys.modules else None


def _stack(seen: list[Seen]) -> dict[str, np.ndarray]:
    return {name: np.stack([each[name] for each in seen]) for name in seen[0]}


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Where a worker leaves pictures for its master, who must have taken them before it is told to do more."""

    memory: mmap.mmap
    cameras: Mapping[str, tuple[int, int]]
    slots: int
    steps: int
    """At most so many at once for each environment."""

    @staticmethod
    def size(cameras: Mapping[str, tuple[int, int]], slots: int, steps: int) -> int:
        """Bytes needed."""
        return max(1, slots * steps * sum(height * width * 3 for height, width in cameras.values()))

    def views(self, slot: int) -> dict[str, UInt8[np.ndarray, "steps h w 3"]]:
        """By camera."""
        views, offset = {}, slot * (self.size(self.cameras, 1, self.steps) if self.cameras else 0)
        for name, (height, width) in self.cameras.items():
            shape = (self.steps, height, width, 3)
            views[name] = np.frombuffer(self.memory, np.uint8, int(np.prod(shape)), offset).reshape(shape)
            offset += int(np.prod(shape))
        return views

    def leave(self, slot: int, went: Went) -> Went:
        """Put the pictures there; what goes through the pipe."""
        for name, view in self.views(slot).items():
            view[: len(went.seen[name])] = went.seen[name]
        numbers = {name: values for name, values in went.seen.items() if name not in self.cameras}
        return dataclasses.replace(went, seen=numbers)

    def take(self, slot: int, went: Went, steps: int) -> Went:
        """With the pictures again, so many of them."""
        pictures = {name: view[:steps].copy() for name, view in self.views(slot).items()}
        return dataclasses.replace(went, seen={**went.seen, **pictures})


def serve(pipe: int, memory: int) -> None:
    """Until the pipe closes."""
    with Connection(pipe) as connection:
        sys.path[:], crew = connection.recv()
        try:
            simulators = Simulators(crew)
        except UserError as error:
            connection.send(error)
            return
        connection.send(simulators.scenes)
        cameras, steps = connection.recv()
        size = Pictures.size(cameras, crew.slots, steps)
        pictures = Pictures(mmap.mmap(memory, size), cameras, crew.slots, steps)
        while True:
            try:
                slot, command = connection.recv()
            except (EOFError, ConnectionError):  # closed, perhaps with answers nobody will hear
                return
            answer, looks = simulators.obey(slot, command), 0
            if isinstance(answer, Went):
                looks = len(next(iter(answer.seen.values())))
                answer = pictures.leave(slot, answer)
            try:
                connection.send((slot, answer, looks))
            except ConnectionError:
                return
