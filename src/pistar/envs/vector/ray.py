"""Workers that are Ray actors, on any machine of a Ray cluster. Camera images come in Ray's messages.

Only simulators run there: an actor knows no models, and policies stay in the main process.
"""

import contextlib
import dataclasses
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pistar.envs.base import Scene, missing_package
from pistar.envs.vector.engine import BUILD_SECONDS, Engine, Worker, WorkerGone
from pistar.envs.vector.worker import Answer, ChunkResult, Command, Simulators, WorkerSpec
from pistar.errors import UserError


class RayActors(Engine):
    """Starts actors of one core each. Uses the Ray that is initialised, else the one at RAY_ADDRESS, else its own."""

    _sharing: ClassVar[int] = 0
    """Engines that use the Ray we initialised. The last one shuts it down."""

    def __init__(self, workers: int | None) -> None:
        self._ray = _import_ray()
        self._shares = RayActors._sharing > 0 or not self._ray.is_initialized()
        if not self._ray.is_initialized():
            _initialise(self._ray, workers)
        RayActors._sharing += self._shares

    @property
    def cores(self) -> int:
        """Cores of all machines."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def start(self, spec: WorkerSpec, slots: range, chunk: int) -> "RayWorker":
        """Start an actor where Ray has a free core."""
        del chunk  # messages may have any size
        return RayWorker(self._ray, spec, slots)

    def wait(self, waitables: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Wait for the first answer, then return all that have arrived."""
        arrived, _ = self._ray.wait(waitables, num_returns=1, timeout=seconds, fetch_local=True)
        if arrived:
            arrived, _ = self._ray.wait(waitables, num_returns=len(waitables), timeout=0, fetch_local=True)
        return list(arrived)

    def close(self) -> None:
        """Shut Ray down if we initialised it and no other engine uses it."""
        if self._shares:
            self._shares = False
            RayActors._sharing -= 1
            if not RayActors._sharing:
                self._ray.shutdown()


class RayWorker(Worker):
    """An actor, and references to the answers it has not given yet."""

    def __init__(self, ray: Any, spec: WorkerSpec, slots: range) -> None:  # noqa: ANN401  # the module
        super().__init__(spec, slots)
        self._pid = 0
        self._ray = ray
        self._actor = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Actor).remote(sys.path)
        self._built = self._actor.build.remote(spec)
        self._answers: list[Any] = []

    @property
    def pid(self) -> int:
        """Process id of the actor."""
        return self._pid

    @property
    def waitable(self) -> Any:  # noqa: ANN401  # an ObjectRef
        """Reference to its next answer."""
        return self._answers[0]

    def _receive_scenes(self) -> Mapping[str, Scene] | UserError:
        scenes: Mapping[str, Scene] | UserError
        try:
            self._pid, scenes = self._ray.get(self._built, timeout=BUILD_SECONDS)
        except self._ray.exceptions.GetTimeoutError as error:
            raise UserError(
                f"{self._names} was not built within {BUILD_SECONDS} s; is there a core for every worker (ray status)?"
            ) from error
        except self._ray.exceptions.RayError as error:
            raise UserError(
                f"A worker for {self._names} ended before its simulators were built ({error}); see `ray status`."
            ) from error
        return scenes

    def prepare(self, cameras: Mapping[str, tuple[int, int]]) -> None:
        """Do nothing: messages may have any size."""

    def _send(self, slot: int, command: Command) -> None:
        self._answers.append(self._actor.execute.remote(slot, command))

    def _receive(self, slot: int) -> Answer:
        answer: Answer
        try:
            answer = self._ray.get(self._answers.pop(0))
        except self._ray.exceptions.RayTaskError:
            raise  # a bug of ours: errors of simulators are answers
        except self._ray.exceptions.RayError as error:
            raise WorkerGone(f"its worker is gone ({type(error).__name__})") from error
        return _copied(answer) if isinstance(answer, ChunkResult) else answer

    def kill(self) -> None:
        """End it at once, whatever it is doing."""
        if self._ray.is_initialized():
            self._ray.kill(self._actor)


class _Actor:
    """The part of a worker that runs in Ray."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)  # this machine may not have them all

    def build(self, spec: WorkerSpec) -> tuple[int, Mapping[str, Scene] | UserError]:
        """Build the simulators. Returns the process id, and the scenes it was asked for."""
        try:
            self._simulators = Simulators(spec)
        except UserError as error:
            return os.getpid(), error
        return os.getpid(), self._simulators.scenes

    def execute(self, slot: int, command: Command) -> Answer:
        """Execute a command. Errors are returned, because Ray would wrap what is raised."""
        return self._simulators.execute(slot, command)


def _copied(result: ChunkResult) -> ChunkResult:
    """Copy arrays out of Ray's object store, which is read-only and fills up quickly."""
    observations = {name: values.copy() for name, values in result.observations.items()}
    film = tuple(image.copy() for image in result.film)
    return dataclasses.replace(result, observations=observations, actions=result.actions.copy(), film=film)


def _import_ray() -> Any:  # noqa: ANN401  # the module
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise missing_package("ray", "ray", error) from error


def _initialise(ray: Any, workers: int | None) -> None:  # noqa: ANN401
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    ours = {"address": "local", "num_cpus": workers, "include_dashboard": False}
    with warnings.catch_warnings(), _sigterm_kept():
        # JAX warns of every fork, but Ray's are followed by exec at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        try:
            ray.init(**({"address": "auto"} if address else ours), log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
            if not address:
                raise
            raise UserError(
                f"Ray cannot be reached at RAY_ADDRESS {address} ({error}); correct it, set RAY_AUTH_MODE if the "
                "cluster asks for a token, or unset RAY_ADDRESS to start Ray on this machine."
            ) from error


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore our SIGTERM handler. Ray sets its own, which would end a run that should first save."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread() and before is not None:
        signal.signal(signal.SIGTERM, before)
