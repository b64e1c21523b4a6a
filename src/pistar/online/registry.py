"""The learner of each algorithm that can make its own data."""

from typing import Any

from pistar.agents.algorithm import Algorithm
from pistar.agents.config import AcrlpdConfig, RiptConfig
from pistar.online.acrlpd_learner import AcrlpdLearner
from pistar.online.collector import RolloutCollector
from pistar.online.learner import OnlineLearner
from pistar.online.ript_learner import RiptLearner
from pistar.training.setup import OnlineRun

LEARNERS: dict[type[Algorithm], Any] = {RiptConfig: RiptLearner, AcrlpdConfig: AcrlpdLearner}


def make_learner(run: OnlineRun, collector: RolloutCollector, where: Any) -> OnlineLearner[Any, Any, Any]:  # noqa: ANN401
    """The learner of the run's algorithm. `where`: shardings of the state."""
    learner: OnlineLearner[Any, Any, Any] = LEARNERS[type(run.config.algorithm)](run, collector, where)
    return learner
