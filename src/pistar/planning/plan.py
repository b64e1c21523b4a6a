"""Memory and FLOPs of a run on each device, before anything is allocated.

The state is counted from shapes and shardings, which is exact. What an update needs besides (activations, gradients) is
XLA's own memory analysis of the compiled program, for as many devices as are asked for; they need not exist, because
XLA compiles for that many on a laptop's processor. A GPU's compiler fuses other operations and computes in bfloat16
where the processor's does not, so that part is an estimate, and mostly too high.
"""

import dataclasses
import os
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from pistar.agents.base import Agent, HasCritic, abstract_state
from pistar.agents.critic_queries import abstract_audit_batch, audit_queries
from pistar.config.train import RLTrainConfig
from pistar.distributed.sharding import (
    batch_sharding,
    bytes_per_device,
    leaf_bytes,
    replicated,
    shard_bytes,
    state_sharding,
)
from pistar.errors import UserError
from pistar.planning.flops import count_flops

HEADROOM = 0.92
"""Usable fraction of a device's memory; the rest is for the runtime and communication."""


def pretend_devices(devices: int) -> None:
    """Have JAX show this many CPU devices. Call it before JAX initialises its devices."""
    flags = (
        f"--xla_force_host_platform_device_count={devices}",
        # CPUs multiply in float32, and XLA would keep a copy of all bfloat16 weights for that; a GPU needs none.
        "--xla_disable_hlo_passes=while-loop-invariant-code-motion",
    )
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags))
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    if jax.device_count() != devices:
        raise UserError(f"--devices is {devices} but JAX has {jax.device_count()} devices; unset XLA_FLAGS.")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of one device, and FLOPs of one update of the whole batch."""

    state: dict[str, int]
    """By component."""
    batch: int
    """Of four batches: one is used, and the loader makes three ahead."""
    scratch: int
    """Activations and gradients of an update, or of an audit if that takes more, by XLA's own analysis."""
    flops: dict[str, int]
    """By part. Backward is what remains of the whole."""
    checkpoint: int
    """Of a checkpoint on disk, with what a run needs to resume."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of all components."""
        return self.state | {"batches": self.batch, "activations and gradients": self.scratch}

    @property
    def total(self) -> int:
        """Bytes of a device."""
        return sum(self.parts.values())

    def fits(self, memory: float) -> bool:
        """Whether it fits into a device of that many bytes."""
        return self.total <= HEADROOM * memory


def make_plan(config: RLTrainConfig, mesh: Mesh) -> Plan:
    """Plan for as many devices as the mesh has. Compiles the update once."""
    return dataclasses.replace(memory_plan(config, mesh), flops=flops_by_part(config))


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory_plan(config: RLTrainConfig, mesh: Mesh) -> Plan:
    """The plan without FLOPs."""
    agent, rows = config.make_agent(), batch_sharding(mesh)
    state = abstract_state(agent)
    batch = sum(shard_bytes(leaf, rows) for leaf in jax.tree.leaves(agent.abstract_batch(config.batch_size)))
    return Plan(
        state=state_bytes(agent, state, mesh),
        batch=4 * batch,
        scratch=max(scratch_bytes(config, mesh), audit_bytes(config, mesh)),
        flops={},
        checkpoint=sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(state)),
    )


def state_bytes(agent: Agent[Any, Any], state: object, mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Bytes of each component on one device."""
    return {name: bytes_per_device(part, mesh) for name, part in agent.components(state).items()}


def scratch_bytes(config: RLTrainConfig, mesh: Mesh) -> int:
    """What one update needs besides state and batch, on each device of a mesh, found by compiling it."""
    agent = config.make_agent()
    where = state_sharding(abstract_state(agent), mesh)

    def update(state: Any, batch: Any, key: Any) -> Any:  # noqa: ANN401  # the agent's own
        return agent.update(state, batch, key, 1.0)

    program = jax.jit(update, donate_argnums=0, out_shardings=(where, None))
    return _scratch_of(program, agent, agent.abstract_batch(config.batch_size), mesh)


def audit_bytes(config: RLTrainConfig, mesh: Mesh) -> int:
    """What an audit of the critic needs besides state and batch."""
    agent, rows = config.make_agent(), config.batch_size // config.gradient_accumulation
    if not isinstance(agent, HasCritic) or config.online is not None:
        return 0
    if not agent.config.audit_every or not config.data.held_out:
        return 0
    ask = jax.jit(audit_queries(agent, agent.config.candidates), out_shardings=replicated(mesh))
    return _scratch_of(ask, agent, abstract_audit_batch(config.model, rows), mesh)


def _scratch_of(program: Any, agent: Agent[Any, Any], rows: object, mesh: Mesh) -> int:  # noqa: ANN401  # of jax.jit
    """What a program of state, rows and a key needs besides these."""

    def placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    state = abstract_state(agent)
    with jax.set_mesh(mesh):
        compiled = program.lower(
            jax.tree.map(placed, state, state_sharding(state, mesh)),
            jax.tree.map(lambda leaf: placed(leaf, batch_sharding(mesh)), rows),
            jax.random.key(0),
        ).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


# --- FLOPs ------------------------------------------------------------------------------------------------------------


def flops_by_part(config: RLTrainConfig) -> dict[str, int]:
    """FLOPs of one update of the whole batch; counted on a few rows, because they are proportional to the rows."""
    agent = config.make_agent()
    rows = 2 * agent.batch_multiple
    args = (abstract_state(agent), agent.abstract_batch(rows), jax.random.key(0))
    names: list[str] = []
    jax.eval_shape(lambda *given: names.extend(agent.work(*given)), *args)
    parts = {name: count_flops(lambda *given, name=name: agent.work(*given)[name](), *args) for name in names}
    whole = count_flops(lambda state, batch, key: agent.update(state, batch, key, 1.0), *args)
    parts["backward and recomputation"] = whole - sum(parts.values())
    return {name: count * config.batch_size // rows for name, count in parts.items()}
