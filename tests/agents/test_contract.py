"""Every algorithm of the registry keeps the contract of `agents/base.py`, and only the registries tell them apart."""

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pistar.agents.acrlpd import Acrlpd, AcrlpdState
from pistar.agents.algorithm import Algorithm
from pistar.agents.base import Agent, CriticSettings, HasCritic, abstract_state
from pistar.agents.config import BcConfig, RiptConfig
from pistar.agents.flow_bc import FlowBC
from pistar.agents.policy_state import PolicyState
from pistar.agents.registry import AGENTS, AgentOptions, make_agent
from pistar.agents.ript import Ript, RiptState
from pistar.agents.td_loss import CriticState
from pistar.models.pi0 import param_shapes
from pistar.optim import AdamWConfig
from pistar.planning.flops import count_flops

from helpers.paths import ROOT
from helpers.small_agents import ACTION_DIMS, MODEL, acrlpd_config, copied, params, same

CONFIGS: dict[str, Algorithm] = {
    config.name: config for config in (BcConfig(augmentation=False), acrlpd_config(), RiptConfig(augmentation=False))
}
"""Small settings of each algorithm."""
NOT_COMPONENTS = {
    "bc": {".step"},
    "acrlpd": {".step", ".policy.step", ".log_beta", ".temperature_optimizer"},
    "ript": {".policy.step"},
}
"""What of a state is in no component: counts of updates, and ACRLPD's temperature with its optimiser."""
ROWS, KEY = 2, jax.random.key(0)

each_algorithm = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def agent_of(name: str, accumulation: int = 1) -> Agent[Any, Any]:
    config = CONFIGS[name]
    options = AgentOptions(
        MODEL,
        AdamWConfig(),
        ACTION_DIMS,
        config.return_bounds(),
        accumulation=accumulation,
        skip_nonfinite=True,
    )
    return make_agent(config, options)


@functools.cache
def compiled(name: str) -> Any:
    """An update of a donated state."""
    return jax.jit(agent_of(name).update, donate_argnums=0)


def fresh_state(name: str) -> Any:
    return agent_of(name).init_from(copied(params()), jax.random.key(1))


def zeros(name: str) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), agent_of(name).abstract_batch(ROWS))


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def test_there_are_settings_here_for_every_algorithm() -> None:
    assert {type(config) for config in CONFIGS.values()} == set(AGENTS)
    assert set(NOT_COMPONENTS) == set(CONFIGS)


@each_algorithm
def test_an_agent_has_everything_the_protocol_names(name: str) -> None:
    agent = agent_of(name)
    assert isinstance(agent, Agent)
    assert agent.model == MODEL
    assert agent.batch_multiple >= 1


@each_algorithm
def test_an_update_keeps_the_states_structure_shapes_and_dtypes(name: str) -> None:
    """So a donated state can be updated by one program again and again."""
    state = fresh_state(name)
    expected = shapes(abstract_state(agent_of(name)))
    assert shapes(state) == expected
    for i in range(2):
        state, metrics = compiled(name)(state, zeros(name), jax.random.key(i), 1.0)
        assert shapes(state) == expected
        assert all(value.shape == () for value in metrics.values())
        assert metrics["skipped"] == 0
    assert compiled(name)._cache_size() == 1


@each_algorithm
def test_components_have_every_array_once_but_counts_and_the_temperature(name: str) -> None:
    agent = agent_of(name)
    state = abstract_state(agent)
    parts = [id(leaf) for part in agent.components(state).values() for leaf in jax.tree.leaves(part)]
    assert len(set(parts)) == len(parts)
    paths = {id(leaf): jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(state)}
    assert set(parts) <= set(paths)
    left_out = {path for leaf, path in paths.items() if leaf not in parts}
    groups = {group for group in NOT_COMPONENTS[name] if any(path.startswith(group) for path in left_out)}
    assert groups == NOT_COMPONENTS[name]
    assert not [path for path in left_out if not path.startswith(tuple(groups))]


@each_algorithm
def test_acting_and_raw_weights_have_all_of_the_models_parameters(name: str) -> None:
    agent, state = agent_of(name), fresh_state(name)
    expected = {parameter: shape.shape for parameter, shape in param_shapes(MODEL).items()}
    for weights in (agent.policy_params(state), agent.raw_params(state)):
        assert {parameter: leaf.shape for parameter, leaf in weights.items()} == expected


@each_algorithm
def test_flops_of_every_part_of_an_update_can_be_counted(name: str) -> None:
    agent = agent_of(name)
    args = (abstract_state(agent), agent.abstract_batch(ROWS), KEY)
    parts: dict[str, int] = {}
    names: list[str] = []
    jax.eval_shape(lambda *given: names.extend(agent.work(*given)), *args)
    assert names
    for part in names:
        parts[part] = count_flops(lambda *given, part=part: agent.work(*given)[part](), *args)
    assert min(parts.values()) > 0, parts
    whole = count_flops(agent.update, *args, 1.0)
    assert sum(parts.values()) < whole, "the backward pass comes on top"


def batch_of(name: str, actions: np.ndarray) -> Any:
    """A batch of these actions, every step and row of which counts."""
    batch = zeros(name)
    counting = [field for field in ("valid", "sequence_mask", "weight", "advantages") if hasattr(batch, field)]
    ones = {field: jnp.ones_like(getattr(batch, field)) for field in counting}
    return dataclasses.replace(batch, **ones, actions=jnp.asarray(actions, jnp.float32))


CHUNKS = np.random.default_rng(0).normal(size=(ROWS, MODEL.action_horizon, MODEL.action_dim))


@each_algorithm
def test_a_gradient_that_is_not_finite_leaves_the_state_as_it_was(name: str) -> None:
    """To the bit, except ACRLPD's own count of updates, by which the policy takes its turns."""
    before = fresh_state(name)
    after, metrics = compiled(name)(copied(before), batch_of(name, np.nan * CHUNKS), KEY, 1.0)
    assert metrics["skipped"] == 1
    if isinstance(before, AcrlpdState):
        assert int(after.step) == 1
        after = dataclasses.replace(after, step=before.step)
    assert same(before, after)


def test_a_policys_gradient_that_is_not_finite_leaves_the_policy_while_the_critic_learns() -> None:
    """What is not executed is not seen by the critic: here it is NaN."""
    before: AcrlpdState = fresh_state("acrlpd")
    chunks = CHUNKS.copy()
    chunks[:, -1] = np.nan
    after, metrics = compiled("acrlpd")(copied(before), batch_of("acrlpd", chunks), KEY, 1.0)
    assert metrics["skipped"] == 1
    assert np.isfinite(metrics["critic/grad_norm"])
    assert same((before.policy, before.log_beta), (after.policy, after.log_beta))
    assert not same(before.critic, after.critic)


@each_algorithm
def test_the_learning_rate_scale_multiplies_the_steps_of_all_optimisers(name: str) -> None:
    agent, before, batch = agent_of(name), fresh_state(name), batch_of(name, CHUNKS)
    none, one = (compiled(name)(copied(before), batch, KEY, scale)[0] for scale in (0.0, 1.0))
    assert same(agent.raw_params(before), agent.raw_params(none))
    assert not same(agent.raw_params(before), agent.raw_params(one))
    if isinstance(agent, HasCritic):
        assert same(agent.critic_params(before), agent.critic_params(none))
        assert not same(agent.critic_params(before), agent.critic_params(one))


@each_algorithm
def test_a_batch_in_parts_keeps_the_contract(name: str) -> None:
    agent = agent_of(name, accumulation=2)
    assert agent.batch_multiple % 2 == 0
    state = abstract_state(agent)
    after, _ = jax.eval_shape(agent.update, state, agent.abstract_batch(agent.batch_multiple), KEY, 1.0)
    assert shapes(after) == shapes(state)


@each_algorithm
def test_exactly_the_algorithms_with_a_critic_offer_its_values(name: str) -> None:
    config = CONFIGS[name]
    has_critic = "critic" in {field.name for field in dataclasses.fields(config)}
    assert has_critic == (name == "acrlpd")
    assert isinstance(agent_of(name), HasCritic) == has_critic
    assert isinstance(config, CriticSettings) == has_critic


# --- Only the registries tell algorithms apart ------------------------------------------------------------------------

OWN_CLASSES = {
    *(config.__name__ for config in AGENTS),
    *(agent.__name__ for agent in (FlowBC, Acrlpd, Ript)),
    *(state.__name__ for state in (PolicyState, CriticState, AcrlpdState, RiptState)),
}
NARROWING = {
    "online/acrlpd_learner.py": {"Acrlpd"},
    "online/ript_learner.py": {"Ript"},
    "demo.py": {"AcrlpdConfig"},
}
"""Files that assert the type of their own algorithm's objects, for the type checker."""
REGISTRIES = ("agents/registry.py", "online/registry.py")
SOURCE = ROOT / "src" / "pistar"


def type_tests(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names of classes a file tests for (isinstance, a class pattern, `type(x) is …`), and whether in an assert."""
    asserted = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Assert) for inner in ast.walk(node.test)}
    for node in ast.walk(tree):
        tested: list[ast.AST] = []
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            tested = node.args[1:]  # type: ignore[assignment]
        elif isinstance(node, ast.MatchClass):
            tested = [node.cls]
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node):
            tested = [node]
        for each in tested:
            for inner in ast.walk(each):
                if isinstance(inner, ast.Name | ast.Attribute):
                    yield (inner.id if isinstance(inner, ast.Name) else inner.attr), id(node) in asserted


def test_no_other_file_asks_which_algorithm_it_has() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if path.parent == SOURCE / "agents" or name in REGISTRIES:
            continue
        found = [each for each in type_tests(ast.parse(path.read_text())) if each[0] in OWN_CLASSES]
        narrowed = {cls for cls, asserted in found if asserted}
        assert [cls for cls, asserted in found if not asserted] == [], name
        assert re.findall(r"(?:get|has)attr\([^,()]*\b(?:algorithm|agent)\b *,", path.read_text()) == [], name
        assert narrowed == NARROWING.get(name, set()), name


@pytest.mark.parametrize(
    "line",
    [
        "if isinstance(agent, Acrlpd): pass",
        "if isinstance(config.algorithm, (BcConfig, RiptConfig)): pass",
        "x = isinstance(state, ript.RiptState | None)",
        "if type(config.algorithm) is AcrlpdConfig: pass",
        "match algorithm:\n    case RiptConfig(): pass",
    ],
)
def test_a_question_for_the_algorithm_is_seen(line: str) -> None:
    assert any(cls in OWN_CLASSES and not asserted for cls, asserted in type_tests(ast.parse(line)))


def test_an_assert_and_a_protocol_are_not_such_questions() -> None:
    assert list(type_tests(ast.parse("assert isinstance(agent, Ript)"))) == [("Ript", True)]
    assert not {cls for cls, _ in type_tests(ast.parse("isinstance(agent, HasCritic)"))} & OWN_CLASSES
    assert Path(SOURCE / REGISTRIES[0]).exists()
