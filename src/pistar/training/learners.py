"""What the loop asks of whoever learns from practice, and who that is."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from pistar.agents.ript import Ript
from pistar.training.acrlpd_learner import AcrlpdLearner
from pistar.training.exploring import Behaviour
from pistar.training.learner import Learner, Stride
from pistar.training.metrics import Window
from pistar.training.practice import Practice, Practised
from pistar.training.run import OnlineRun

State = TypeVar("State")
Kept = TypeVar("Kept")
Lessons = TypeVar("Lessons")


@runtime_checkable
class OnlineLearner(Protocol[State, Kept, Lessons]):
    """An algorithm among its rollouts. `State` is its agent's, `Kept` what it keeps of a group."""

    def check(self, instruction: str) -> list[str]:
        """Refuse, before anything is rolled out, what cannot be learnt; and what to know about the rest."""
        ...

    def behaviour(self, state: State, iteration: int, *, own_copy: bool = False) -> Behaviour:
        """The policy as it acts now. A copy outlasts the updates, which use the state up."""
        ...

    def practise(self, behaviour: Behaviour, iteration: int) -> Practised[Kept]:
        """An iteration's rollouts. May run beside `learn`, so it changes nothing that is learnt from."""
        ...

    def lessons(self, kept: Sequence[Kept]) -> Lessons:
        """What an iteration learns from, now that this was kept."""
        ...

    def learn(
        self, state: State, lessons: Lessons, iteration: int, stride: Stride
    ) -> tuple[State, Window, dict[str, float]]:
        """An iteration's updates, what they measured, and what else is to be told."""
        ...

    def updates(self, state: State) -> int:
        """Behind that state, since the run began."""
        ...

    def remembered(self) -> Callable[[Path], None]:
        """What writes its memory, as it is now, into a checkpoint."""
        ...

    def recall(self, folder: Path) -> None:
        """That of a checkpoint."""
        ...


def make_learner(run: OnlineRun, practice: Practice, where: Any) -> OnlineLearner[Any, Any, Any]:  # noqa: ANN401
    """By the run's algorithm. `where`: shardings of the state."""
    return (Learner if isinstance(run.agent, Ript) else AcrlpdLearner)(run, practice, where)
