"""Workers that are Ray's actors, on whichever machines Ray has; pictures come in its messages.

Only simulators run there: an actor knows nothing of models, and policies stay where they are.
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

from pistar.envs.engine import BUILD_SECONDS, Engine, Gone, Worker
from pistar.envs.env import Scene, missing
from pistar.envs.worker import Begin, Crew, Fault, Go, Simulators, Went
from pistar.errors import UserError


class RayActors(Engine):
    """Actors of one core each. Ray is used as it was initialised; else that of RAY_ADDRESS, or one of our own here."""

    _sharing: ClassVar[int] = 0
    """Engines that use the Ray we have initialised. The last one shuts it down."""

    def __init__(self, workers: int | None) -> None:
        self._ray = _import_ray()
        self._shares = RayActors._sharing > 0 or not self._ray.is_initialized()
        if not self._ray.is_initialized():
            _initialise(self._ray, workers)
        RayActors._sharing += self._shares

    @property
    def cores(self) -> int:
        """Of all machines."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def start(self, crew: Crew, slots: range, chunk: int) -> "RayWorker":
        """One more, where Ray has a core for it."""
        del chunk  # messages may have any size
        return RayWorker(self._ray, crew, slots)

    def wait(self, doors: Sequence[Any], seconds: float) -> Sequence[Any]:
        """Until one of these answers is there, then for what else is."""
        found, _ = self._ray.wait(doors, num_returns=1, timeout=seconds, fetch_local=True)
        if found:
            found, _ = self._ray.wait(doors, num_returns=len(doors), timeout=0, fetch_local=True)
        return list(found)

    def close(self) -> None:
        """Shut Ray down, if nobody but us has needed it."""
        if self._shares:
            self._shares = False
            RayActors._sharing -= 1
            if not RayActors._sharing:
                self._ray.shutdown()


class RayWorker(Worker):
    """An actor, and what it has promised to answer."""

    def __init__(self, ray: Any, crew: Crew, slots: range) -> None:  # noqa: ANN401  # the module
        super().__init__(slots)
        self._pid = 0
        self._ray, self._names = ray, " and ".join(crew.names[:2])
        self._actor = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Actor).remote(sys.path)
        self._built = self._actor.build.remote(crew)
        self._answers: list[Any] = []

    @property
    def pid(self) -> int:
        """Of the actor's process."""
        return self._pid

    @property
    def door(self) -> Any:  # noqa: ANN401  # an ObjectRef
        """Its next answer, once it is there."""
        return self._answers[0]

    def ready(self) -> Mapping[str, Scene]:
        """Once its simulators stand."""
        try:
            self._pid, scenes = self._ray.get(self._built, timeout=BUILD_SECONDS)
        except self._ray.exceptions.GetTimeoutError as error:
            raise UserError(
                f"{self._names} was not built within {BUILD_SECONDS} s; is there a core for every worker (ray status)?"
            ) from error
        except self._ray.exceptions.RayError as error:
            raise UserError(f"A worker for {self._names} ended before it began: {error}") from error
        if isinstance(scenes, UserError):
            raise scenes
        assert isinstance(scenes, dict)
        return scenes

    def prepare(self, cameras: Mapping[str, tuple[int, int]]) -> None:
        """Nothing: messages may have any size."""

    def _send(self, inner: int, command: Begin | Go) -> None:
        self._answers.append(self._actor.obey.remote(inner, command))

    def _receive(self, inner: int) -> Went | Fault | UserError:
        answer: Went | Fault | UserError
        try:
            answer = self._ray.get(self._answers.pop(0))
        except self._ray.exceptions.RayTaskError:
            raise  # our own mistake: what goes wrong in a simulator is an answer
        except self._ray.exceptions.RayError as error:
            raise Gone(f"its worker is gone ({type(error).__name__})") from error
        return _copied(answer) if isinstance(answer, Went) else answer

    def end(self) -> None:
        """At once, whatever it is doing."""
        if self._ray.is_initialized():
            self._ray.kill(self._actor)


class _Actor:
    """What runs there."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)  # as far as this machine has them

    def build(self, crew: Crew) -> tuple[int, Mapping[str, Scene] | UserError]:
        """Who it is, and the scenes it was asked for."""
        try:
            self._simulators = Simulators(crew)
        except UserError as error:
            return os.getpid(), error
        return os.getpid(), self._simulators.scenes

    def obey(self, inner: int, command: Begin | Go) -> Went | Fault | UserError:
        """Do it. What goes wrong is an answer, for Ray would make an exception of its own of it."""
        return self._simulators.obey(inner, command)


def _copied(went: Went) -> Went:
    """Out of Ray's memory, which is full soon and cannot be written to."""
    seen = {name: values.copy() for name, values in went.seen.items()}
    return dataclasses.replace(
        went, seen=seen, actions=went.actions.copy(), film=tuple(picture.copy() for picture in went.film)
    )


def _import_ray() -> Any:  # noqa: ANN401  # the module
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise missing("ray", "ray", error) from error


def _initialise(ray: Any, workers: int | None) -> None:  # noqa: ANN401
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS")
    ours = {"address": "local", "num_cpus": workers, "include_dashboard": False}
    with warnings.catch_warnings(), _sigterm_kept():
        # JAX warns of any fork. Ray's are followed by exec at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        try:
            ray.init(**({"address": "auto"} if address else ours), log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
            if not address:
                raise
            raise UserError(
                f"Ray cannot be had at RAY_ADDRESS {address} ({error}); correct it, set RAY_AUTH_MODE if that cluster "
                "asks for a token, or unset it for a Ray on this machine."
            ) from error


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray sets a handler of its own, and would end a run that is asked to save and stop."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread() and before is not None:
        signal.signal(signal.SIGTERM, before)
