"""What a run takes of each device and of time, before anything is allocated.

The state is counted from shapes and shardings, which is exact. What an update needs besides (activations, gradients) is
XLA's own memory analysis of the compiled program, for as many devices as are asked for; they need not exist, because
XLA compiles for that many on a laptop's processor. A GPU's compiler fuses other things together and computes in
bfloat16 where the processor's does not, so that part is an estimate, and mostly too high.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from pistar.agents.acrlpd import Acrlpd, AcrlpdState
from pistar.agents.flow_bc import FlowBCState
from pistar.agents.ript import RiptBatch, RiptState
from pistar.config import Freezable, Pi0Config, RiptConfig
from pistar.errors import UserError
from pistar.models.pi0 import bind, param_shapes
from pistar.training.audit import Shown, questions
from pistar.training.config import BcConfig, RLTrainConfig
from pistar.training.flops import count_flops
from pistar.training.optimizers import Moments
from pistar.training.run import Agent, make_agent
from pistar.training.sharding import (
    bytes_per_device,
    everywhere,
    leaf_bytes,
    over_rows,
    shard_bytes,
    state_sharding,
)
from pistar.types import ChunkBatch, Observation, PolicyBatch

T = TypeVar("T")

HEADROOM = 0.92
"""Of a device's memory; the rest is the runtime's and the communication's."""


def pretend(devices: int) -> None:
    """Have so many, of the one kind that every machine has. Before JAX is asked for any."""
    flags = (
        f"--xla_force_host_platform_device_count={devices}",
        # Processors multiply in float32, and XLA would keep a copy of all bfloat16 weights for it; a GPU needs none.
        "--xla_disable_hlo_passes=while-loop-invariant-code-motion",
    )
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags))
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    if jax.device_count() != devices:
        raise UserError(f"{devices} devices were asked for and JAX has {jax.device_count()}; unset XLA_FLAGS.")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of one device, and FLOPs of one update of the whole batch."""

    state: dict[str, int]
    """By component."""
    batch: int
    """Four of them: one is used, and as many are on the devices as the loader makes ahead."""
    scratch: int
    """Activations and gradients of an update, or of an audit if that takes more: XLA's own analysis of either."""
    flops: dict[str, int]
    """By part. Backward is what remains of the whole."""
    checkpoint: int
    """On disk, with what a run needs to resume."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by component, all of them."""
        return self.state | {"batches": self.batch, "activations and gradients": self.scratch}

    @property
    def total(self) -> int:
        """Of a device."""
        return sum(self.parts.values())

    def fits(self, memory: float) -> bool:
        """Into a device of so many bytes."""
        return self.total <= HEADROOM * memory


# --- Shapes -----------------------------------------------------------------------------------------------------------


def abstract_state(config: RLTrainConfig, agent: Agent) -> Any:  # noqa: ANN401  # the agent's own
    """The shapes of a run's state."""

    def first(params: dict[str, jax.Array]) -> AcrlpdState | FlowBCState | RiptState:
        return agent.init_from(params, jax.random.key(0)) if isinstance(agent, Acrlpd) else agent.init_from(params)

    return jax.eval_shape(first, param_shapes(config.model))


def abstract_batch(config: RLTrainConfig, rows: int) -> PolicyBatch | ChunkBatch | RiptBatch:
    """The shapes of a batch, as the loader makes it, or practice."""
    steps = (rows, config.model.action_horizon)

    def struct(*shape: int, dtype: Any = np.float32) -> Any:  # noqa: ANN401  # stands for an array
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))  # type: ignore[no-untyped-call]

    seen = _abstract_observation(config.model, rows, struct)
    actions = struct(*steps, config.model.action_dim)
    if isinstance(config.algorithm, BcConfig):
        return _unchecked(
            PolicyBatch, observations=seen, actions=actions, valid=struct(*steps, dtype=bool), weight=struct(rows)
        )
    if isinstance(config.algorithm, RiptConfig):
        return _unchecked(
            RiptBatch,
            observations=seen,
            actions=actions,
            valid=struct(*steps, dtype=bool),
            advantages=struct(rows),
            demonstration=struct(rows, dtype=bool),
        )
    return _unchecked(
        ChunkBatch,
        observations=seen,
        next_observations=seen,
        actions=actions,
        rewards=struct(*steps),
        masks=struct(*steps),
        valid=struct(*steps, dtype=bool),
        terminals=struct(*steps, dtype=bool),
        next_terminal=struct(rows, dtype=bool),
        sequence_mask=struct(rows, dtype=bool),
    )


def _abstract_observation(model: Pi0Config, rows: int, struct: Callable[..., Any]) -> Observation:
    size, tokens = model.image_size, model.max_token_len
    return _unchecked(
        Observation,
        images={camera: struct(rows, size, size, 3, dtype=np.uint8) for camera in model.cameras},
        image_masks={camera: struct(rows, dtype=bool) for camera in model.cameras},
        state=struct(rows, model.action_dim),
        tokenized_prompt=struct(rows, tokens, dtype=np.int32),
        tokenized_prompt_mask=struct(rows, tokens, dtype=bool),
    )


def _unchecked(cls: type[T], **fields: object) -> T:
    """With shapes in the place of arrays, which the tests' checks of types would refuse."""
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


# --- Memory -----------------------------------------------------------------------------------------------------------


def components(state: AcrlpdState | FlowBCState | RiptState) -> dict[str, object]:
    """The parts of a state that people speak of."""
    policy = state if isinstance(state, FlowBCState) else state.policy
    parts: dict[str, object] = {
        "weights that train": policy.trained,
        "frozen weights": policy.frozen,
        "average": policy.average,
        "moments": policy.optimizer,
    }
    if isinstance(state, RiptState):
        parts["reference"] = state.reference
    if isinstance(state, AcrlpdState):
        parts |= {
            "critic": state.critic,
            "target critic": state.target_critic,
            "critic's moments": state.critic_optimizer,
        }
    return {name: part for name, part in parts.items() if jax.tree.leaves(part)}


def state_bytes(state: AcrlpdState | FlowBCState | RiptState, mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Of each component, on one device."""
    return {name: bytes_per_device(part, mesh) for name, part in components(state).items()}


def scratch_bytes(config: RLTrainConfig, mesh: Mesh) -> int:
    """What one update needs besides state and batch, on each device of a mesh, by compiling it."""
    agent: Any = make_agent(config)
    where = state_sharding(abstract_state(config, agent), mesh)
    update = jax.jit(agent.update, donate_argnums=0, out_shardings=(where, None))
    return _scratch_of(update, config, abstract_batch(config, config.batch_size), mesh)


def audit_bytes(config: RLTrainConfig, mesh: Mesh) -> int:
    """The same of a look at the critic."""
    agent, rows = make_agent(config), config.batch_size // config.gradient_accumulation
    if not isinstance(agent, Acrlpd) or config.practises or not config.audit_every or not config.data.held_out:
        return 0
    batch: Any = abstract_batch(config, rows)
    shown = _unchecked(
        Shown,
        row=jax.ShapeDtypeStruct((rows,), np.dtype(np.int32)),  # type: ignore[no-untyped-call]
        observations=batch.observations,
        next_observations=batch.next_observations,
        actions=batch.actions,
        others=batch.actions,
        valid=batch.valid,
    )
    ask = jax.jit(questions(agent, agent.config.candidates), out_shardings=everywhere(mesh))
    return _scratch_of(ask, config, shown, mesh)


def _scratch_of(program: Any, config: RLTrainConfig, rows: object, mesh: Mesh) -> int:  # noqa: ANN401  # what jax.jit gives
    """What a program of state, rows and a key needs besides these."""

    def placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    state = abstract_state(config, make_agent(config))
    with jax.set_mesh(mesh):
        compiled = program.lower(
            jax.tree.map(placed, state, state_sharding(state, mesh)),
            jax.tree.map(lambda leaf: placed(leaf, over_rows(mesh)), rows),
            jax.random.key(0),
        ).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


# --- Work -------------------------------------------------------------------------------------------------------------


def flops_by_part(config: RLTrainConfig) -> dict[str, int]:
    """Of one update of the whole batch; counted on a few rows, because all of it goes by the row."""
    agent = make_agent(config)
    rows = 2 * config.gradient_accumulation * (agent.config.critic_updates if isinstance(agent, Acrlpd) else 1)
    state, batch = abstract_state(config, agent), abstract_batch(config, rows)
    model, key = config.model, jax.random.key(0)
    params = param_shapes(model)
    prefix_shape = jax.eval_shape(lambda p, seen: bind(model, p).encode(seen), params, batch.observations)
    chunk = jnp.zeros((rows, model.action_horizon, model.action_dim))

    parts = {
        "prefix": count_flops(lambda p, seen: bind(model, p).encode(seen), params, batch.observations),
        "suffix": count_flops(
            lambda p, prefix: bind(model, p).flow_loss(prefix, chunk, chunk, jnp.ones(rows)), params, prefix_shape
        ),
    }
    if isinstance(agent, Acrlpd):
        n, steps, passes = agent.config.candidates, agent.config.flow_steps, 1 if agent.config.actor == "bc" else 2
        noise = jnp.zeros((rows, n, *chunk.shape[1:]))
        sampling = count_flops(
            lambda p, prefix: bind(model, p).sample(prefix, noise, num_steps=steps), params, prefix_shape
        )
        parts |= {"prefix of s'": parts["prefix"], "sampling": passes * sampling}
        if config.gradient_accumulation > 1:
            parts["prefix once more"] = parts["prefix"]
        seen = jax.eval_shape(agent.critic.see, batch.observations, prefix_shape)
        transitions = jax.eval_shape(agent.transitions, state, batch, seen, key)
        parts["critic"] = count_flops(agent.update_critic, state, transitions, key)
    whole = count_flops(agent.update, state, batch, key)
    parts["backward, with what it computes again"] = whole - sum(parts.values())
    return {name: count * config.batch_size // rows for name, count in parts.items()}


# --- The plan ---------------------------------------------------------------------------------------------------------


def make_plan(config: RLTrainConfig, mesh: Mesh) -> Plan:
    """For as many devices as the mesh has. Compiles the update once."""
    return dataclasses.replace(_memory_plan(config, mesh), flops=flops_by_part(config))


def _memory_plan(config: RLTrainConfig, mesh: Mesh) -> Plan:
    state = abstract_state(config, make_agent(config))
    rows = over_rows(mesh)
    batch = sum(shard_bytes(leaf, rows) for leaf in jax.tree.leaves(abstract_batch(config, config.batch_size)))
    return Plan(
        state=state_bytes(state, mesh),
        batch=4 * batch,
        scratch=max(scratch_bytes(config, mesh), audit_bytes(config, mesh)),
        flops={},
        checkpoint=sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(state)),
    )


# --- What would make it fit -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lever:
    """A way to need less, as an option of `pistar train`."""

    option: str
    pull: Callable[[RLTrainConfig], RLTrainConfig]


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Options that make a run fit, and the plan with them."""

    options: tuple[str, ...]
    plan: Plan


def _all_devices(config: RLTrainConfig) -> RLTrainConfig:
    return dataclasses.replace(config, fsdp_devices=None)


def _small_average(config: RLTrainConfig) -> RLTrainConfig:
    return dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, ema_dtype="bfloat16"))


def _moments(kind: Moments) -> Lever:
    def pull(config: RLTrainConfig) -> RLTrainConfig:
        optimizer = dataclasses.replace(config.policy_optimizer, moments=kind)
        return dataclasses.replace(config, policy_optimizer=optimizer)

    return Lever(f"--policy-optimizer.moments {kind}", pull)


def _remat(config: RLTrainConfig) -> RLTrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat="full"))


def _freeze_vision(config: RLTrainConfig) -> Lever:
    frozen: tuple[Freezable, ...] = (*(part for part in config.model.freeze if part != "vision"), "vision")

    def pull(config: RLTrainConfig) -> RLTrainConfig:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=frozen))

    return Lever(f"--model.freeze {' '.join(frozen)}", pull)


def ladder(config: RLTrainConfig, with_lora: Callable[[RLTrainConfig], RLTrainConfig]) -> list[tuple[Lever, ...]]:
    """Sets of levers for the state, the cheapest first: what costs nothing, what rounds, what trains less."""
    free = (Lever("--fsdp-devices None", _all_devices),) if config.fsdp_devices is not None else ()
    again = (*free, Lever("--model.remat full", _remat)) if config.model.remat != "full" else free
    average = (Lever("--algorithm.ema-dtype bfloat16", _small_average),) if config.algorithm.ema_decay else ()
    adapters = () if config.model.vlm.lora and config.model.expert.lora else (Lever("--lora", with_lora),)
    factored, vision = _moments("factored"), _freeze_vision(config)
    sets = [
        (),
        free,
        again,
        (*again, *average),
        (*again, *average, _moments("bfloat16")),
        (*again, *average, factored),
        (*again, *adapters),
        (*again, *adapters, factored),
        (*again, *adapters, factored, vision),
    ]
    return list({tuple(lever.option for lever in levers): levers for levers in sets}.values())


def find_remedy(
    config: RLTrainConfig,
    memory: float,
    make_mesh: Callable[[RLTrainConfig], Mesh],
    with_lora: Callable[[RLTrainConfig], RLTrainConfig],
    say: Callable[[str], object] = lambda _: None,
) -> Remedy | None:
    """The first set of the ladder that fits, with as little accumulation as it needs; None: nothing helps.

    Scratch goes by the rows worked on at a time, plus what does not (gradients, gathered weights). So each set is
    compiled at one row a device, the least there is, and what it then has room for is tried.
    """
    for levers in ladder(config, with_lora):
        pulled, options = config, tuple(lever.option for lever in levers)
        for lever in levers:
            pulled = lever.pull(pulled)
        mesh = make_mesh(pulled)
        # No update is without the state, and a gradient of each weight that trains.
        state = abstract_state(pulled, make_agent(pulled))
        trained = (state if isinstance(state, FlowBCState) else state.policy).trained
        if bytes_per_device(state, mesh) + bytes_per_device(trained, mesh) > HEADROOM * memory:
            continue
        most = config.batch_size // mesh.size
        say(f"trying {' '.join((*options, f'--gradient-accumulation {most}'))}")
        least = _memory_plan(_in_parts(pulled, most), mesh)
        if not least.fits(memory):
            continue
        best, plan = _fewest_parts(pulled, mesh, least, memory, " ".join(options), say)
        return _remedy((*options, *_parts_option(config, best)), _in_parts(pulled, best), plan)
    return None


def _fewest_parts(
    config: RLTrainConfig, mesh: Mesh, least: Plan, memory: float, options: str, say: Callable[[str], object]
) -> tuple[int, Plan]:
    """As few as fit, given the plan of the most, which does: scratch grows by the row, so two points tell where."""
    most = config.batch_size // mesh.size
    divisors = [n for n in range(1, most + 1) if most % n == 0 and config.batch_size % n == 0]
    plans = {most: least}

    def fits(parts: int) -> bool:
        if parts not in plans:
            say(f"trying {options} --gradient-accumulation {parts}")
            plans[parts] = _memory_plan(_in_parts(config, parts), mesh)
        return plans[parts].fits(memory)

    fewer = divisors[max(len(divisors) - 2, 0)]
    if not fits(fewer):
        return most, least
    each = (plans[fewer].scratch - least.scratch) / max(most // fewer - 1, 1)
    room = HEADROOM * memory - least.total
    best = next(n for n in divisors if (n == fewer or (most // n - 1) * each <= room) and fits(n))
    return best, plans[best]


def _parts_option(config: RLTrainConfig, parts: int) -> tuple[str, ...]:
    return (f"--gradient-accumulation {parts}",) if parts != config.gradient_accumulation else ()


def _remedy(options: tuple[str, ...], config: RLTrainConfig, plan: Plan) -> Remedy:
    return Remedy(options, dataclasses.replace(plan, flops=flops_by_part(config)))


def _in_parts(config: RLTrainConfig, parts: int) -> RLTrainConfig:
    return dataclasses.replace(config, gradient_accumulation=parts)
