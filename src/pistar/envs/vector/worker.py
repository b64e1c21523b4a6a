"""What a worker runs: the simulators of one process, the commands they take and the answers they give.

A worker process is started anew, not forked, and knows no models. Commands and answers go through a pipe, and camera
images through shared memory.
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

from pistar.envs.base import EnvOptions, EpisodeStatus, RawObservation, Scene, StartEnv
from pistar.envs.vector.pool import EnvPool
from pistar.errors import UserError

ScriptedAct = Callable[[], np.ndarray]
"""Returns a script's next action. It runs inside the worker, and holds its environment and its random numbers."""


@dataclasses.dataclass(frozen=True)
class Script:
    """A script that acts in place of a policy: `make(env, rng, **options)` returns a `ScriptedAct` for one episode."""

    make: str
    """module:function"""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def act_in(self, env: StartEnv, start_id: int) -> ScriptedAct:
        """Start the script for one episode, with random numbers of the seed and the start state."""
        module, _, function = self.make.partition(":")
        act: ScriptedAct = getattr(importlib.import_module(module), function)(
            env, np.random.default_rng([self.seed, start_id]), **self.options
        )
        return act


@dataclasses.dataclass(frozen=True)
class Reset:
    """Command: start an episode and observe."""

    start_id: int
    script: Script | None = None
    film: bool = False
    """Also render every step of the episode for people."""
    task: str | None = None
    """The environment's name. None means the first one."""


@dataclasses.dataclass(frozen=True)
class StepChunk:
    """Command: execute actions until they are done or the episode is over."""

    actions: Float[np.ndarray, "k a"] | int
    """The actions, or how many the script is to choose."""
    observe_all: bool
    """Observe after every step. Otherwise only after the last."""


Command = Reset | StepChunk


@dataclasses.dataclass(frozen=True)
class ChunkResult:
    """Answer: what a command led to."""

    observations: Mapping[str, np.ndarray]
    """`[n, ...]` after every step, or `[1, ...]` after the last."""
    actions: Float[np.ndarray, "n a"]
    """As executed, after clipping. Empty after a reset."""
    status: EpisodeStatus = "running"
    truncated: bool = False
    film: tuple[UInt8[np.ndarray, "h w 3"], ...] = ()
    cpu_seconds: float = 0.0

    @property
    def over(self) -> bool:
        """Whether the episode is over."""
        return self.status != "running" or self.truncated


LOST = "lost"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Answer: a command failed, and the policy is not to blame."""

    kind: str
    """raised, not finite, died or hung; or `LOST`, if its worker died or hung at another episode."""
    detail: str


Answer = ChunkResult | Fault | UserError


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """What a worker holds."""

    names: Sequence[str]
    """Tasks that may be asked of it, as environments' names."""
    options: EnvOptions
    slots: int
    """Episodes that can run at the same time."""
    spare: int = 0
    """Environments kept beyond one for each slot."""
    described: Sequence[str] = ()
    """Tasks whose scenes it reports."""


class Simulators:
    """The environments of this process. Each slot has one of the task it was last reset to."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._first, *others = spec.names
        self._pool = EnvPool(spec.options, spec.slots, spec.spare)
        self._scripts: dict[int, ScriptedAct] = {}
        self._filmed: set[int] = set()
        # With one task all slots will need it, so build it now. With several, wait until it is known which are needed.
        self.scenes: dict[str, Scene] = (
            {name: self._pool.scene(name) for name in spec.described}
            if others
            else {self._first: dataclasses.replace(self._pool.fill(self._first), drawn_by=_drawn_by())}
        )

    def execute(self, slot: int, command: Command) -> Answer:
        """Execute a command. An error inside is returned as an answer, and its environment is not used again."""
        since = time.process_time()
        try:
            result = self._reset(slot, command) if isinstance(command, Reset) else self._step(slot, command)
        except UserError as error:
            self._pool.discard(slot)
            return error
        except Exception as error:  # a simulator may raise anything
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._pool.discard(slot)
            return Fault(
                "raised", f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
            )
        broken = [name for name, values in result.observations.items() if not np.isfinite(values).all()]
        if broken:
            self._pool.discard(slot)  # NaN inside a simulator may survive a reset
            return Fault("not finite", f"observation {broken[0]} has NaN or Inf")
        if result.over:
            self._pool.release(slot)
        return dataclasses.replace(result, cpu_seconds=time.process_time() - since)

    def _reset(self, slot: int, command: Reset) -> ChunkResult:
        env = self._pool.acquire(slot, command.task or self._first)
        env.begin(command.start_id)
        self._scripts.pop(slot, None)
        if command.script is not None:
            self._scripts[slot] = command.script.act_in(env, command.start_id)
        self._filmed.discard(slot)
        if command.film:
            self._filmed.add(slot)
        film = (env.render(),) if command.film else ()
        return ChunkResult(_stack([env.observe()]), np.zeros((0, env.scene.action_dim)), film=film)

    def _step(self, slot: int, command: StepChunk) -> ChunkResult:
        env = self._pool.current(slot)
        observations: list[RawObservation] = []
        actions: list[np.ndarray] = []
        film: list[np.ndarray] = []
        steps = command.actions if isinstance(command.actions, int) else len(command.actions)
        status: EpisodeStatus = "running"
        truncated = False
        for step in range(steps):
            action = self._scripts[slot]() if isinstance(command.actions, int) else command.actions[step]
            executed, status, truncated = env.act(action)
            actions.append(executed)
            last = status != "running" or truncated or step == steps - 1
            if command.observe_all or last:
                observations.append(env.observe())
            if slot in self._filmed:
                film.append(env.render())
            if last:
                break
        return ChunkResult(_stack(observations), np.stack(actions), status, truncated, tuple(film))

    def close(self) -> None:
        """Close all environments. Needed only in a process that lives on."""
        self._pool.close()


def _drawn_by() -> str | None:
    return os.environ.get("MUJOCO_GL") if "mujoco" in sys.modules else None


def _stack(observations: list[RawObservation]) -> dict[str, np.ndarray]:
    return {name: np.stack([each[name] for each in observations]) for name in observations[0]}


@dataclasses.dataclass(frozen=True)
class SharedImages:
    """Shared memory for camera images. The main process must read them before it sends the next command."""

    memory: mmap.mmap
    cameras: Mapping[str, tuple[int, int]]
    slots: int
    steps: int
    """Most images per camera and slot."""

    @staticmethod
    def size(cameras: Mapping[str, tuple[int, int]], slots: int, steps: int) -> int:
        """Return the bytes needed."""
        return max(1, slots * steps * sum(height * width * 3 for height, width in cameras.values()))

    def views(self, slot: int) -> dict[str, UInt8[np.ndarray, "steps h w 3"]]:
        """Return a slot's part of the memory as arrays, by camera."""
        views, offset = {}, slot * (self.size(self.cameras, 1, self.steps) if self.cameras else 0)
        for name, (height, width) in self.cameras.items():
            shape = (self.steps, height, width, 3)
            views[name] = np.frombuffer(self.memory, np.uint8, int(np.prod(shape)), offset).reshape(shape)
            offset += int(np.prod(shape))
        return views

    def write(self, slot: int, result: ChunkResult) -> ChunkResult:
        """Write the images to the memory, and return the result without them, for the pipe."""
        for name, view in self.views(slot).items():
            view[: len(result.observations[name])] = result.observations[name]
        numbers = {name: values for name, values in result.observations.items() if name not in self.cameras}
        return dataclasses.replace(result, observations=numbers)

    def read(self, slot: int, result: ChunkResult, steps: int) -> ChunkResult:
        """Return the result with the images of these many steps."""
        images = {name: view[:steps].copy() for name, view in self.views(slot).items()}
        return dataclasses.replace(result, observations={**result.observations, **images})


def serve(pipe: int, memory: int) -> None:
    """Run a worker process until its pipe is closed. Both arguments are file descriptors."""
    with Connection(pipe) as connection:
        sys.path[:], spec = connection.recv()
        try:
            simulators = Simulators(spec)
        except UserError as error:
            connection.send(error)
            return
        connection.send(simulators.scenes)
        cameras, steps = connection.recv()
        size = SharedImages.size(cameras, spec.slots, steps)
        images = SharedImages(mmap.mmap(memory, size), cameras, spec.slots, steps)
        while True:
            try:
                slot, command = connection.recv()
            except (EOFError, ConnectionError):  # closed, perhaps with answers nobody will read
                return
            answer, observed = simulators.execute(slot, command), 0
            if isinstance(answer, ChunkResult):
                observed = len(next(iter(answer.observations.values())))
                answer = images.write(slot, answer)
            try:
                connection.send((slot, answer, observed))
            except ConnectionError:
                return
