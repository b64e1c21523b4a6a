"""What would make a run fit: the cheapest options, tried in order."""

import dataclasses
from collections.abc import Callable

from jax.sharding import Mesh

from pistar.agents.base import TRAINED, abstract_state
from pistar.config.train import RLTrainConfig
from pistar.distributed.sharding import bytes_per_device
from pistar.models.config import Freezable
from pistar.optim import Moments
from pistar.planning.plan import HEADROOM, Plan, flops_by_part, memory_plan

Change = Callable[[RLTrainConfig], RLTrainConfig]


@dataclasses.dataclass(frozen=True)
class MemoryOption:
    """A way to need less memory, as an option of `pistar train`."""

    option: str
    apply: Change


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Options that make a run fit, and the plan with them."""

    options: tuple[str, ...]
    plan: Plan


def _all_devices(config: RLTrainConfig) -> RLTrainConfig:
    return dataclasses.replace(config, fsdp_devices=None)


def _small_average(config: RLTrainConfig) -> RLTrainConfig:
    return dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, ema_dtype="bfloat16"))


def _moments(kind: Moments) -> MemoryOption:
    def apply(config: RLTrainConfig) -> RLTrainConfig:
        optimizer = dataclasses.replace(config.policy_optimizer, moments=kind)
        return dataclasses.replace(config, policy_optimizer=optimizer)

    return MemoryOption(f"--policy-optimizer.moments {kind}", apply)


def _remat(config: RLTrainConfig) -> RLTrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat="full"))


def _freeze_vision(config: RLTrainConfig) -> MemoryOption:
    frozen: tuple[Freezable, ...] = (*(part for part in config.model.freeze if part != "vision"), "vision")

    def apply(config: RLTrainConfig) -> RLTrainConfig:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=frozen))

    return MemoryOption(f"--model.freeze {' '.join(frozen)}", apply)


def option_sets(config: RLTrainConfig, with_lora: Change) -> list[tuple[MemoryOption, ...]]:
    """Sets of options, the cheapest first: what costs nothing, what rounds, what trains less."""
    free = (MemoryOption("--fsdp-devices None", _all_devices),) if config.fsdp_devices is not None else ()
    again = (*free, MemoryOption("--model.remat full", _remat)) if config.model.remat != "full" else free
    average = (MemoryOption("--algorithm.ema-dtype bfloat16", _small_average),) if config.algorithm.ema_decay else ()
    adapters = () if config.model.vlm.lora and config.model.expert.lora else (MemoryOption("--lora", with_lora),)
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
    return list({tuple(each.option for each in options): options for options in sets}.values())


def find_remedy(
    config: RLTrainConfig,
    memory: float,
    make_mesh: Callable[[RLTrainConfig], Mesh],
    with_lora: Change,
    say: Callable[[str], object] = lambda _: None,
) -> Remedy | None:
    """The first set of options that fits, with as little gradient accumulation as it needs. None if nothing helps.

    Scratch memory grows with the rows worked on at a time, plus a constant (gradients, gathered weights). So each set
    is compiled at one row per device, the least there is, and what it then has room for is tried.
    """
    for options in option_sets(config, with_lora):
        changed, names = config, tuple(each.option for each in options)
        for each in options:
            changed = each.apply(changed)
        mesh, agent = make_mesh(changed), changed.make_agent()
        # Every update needs at least the state, and a gradient of each trained weight.
        state = abstract_state(agent)
        trained = agent.components(state)[TRAINED]
        if bytes_per_device(state, mesh) + bytes_per_device(trained, mesh) > HEADROOM * memory:
            continue
        most = config.batch_size // mesh.size
        say(f"trying {' '.join((*names, f'--gradient-accumulation {most}'))}")
        least = memory_plan(_in_parts(changed, most), mesh)
        if not least.fits(memory):
            continue
        parts, plan = _fewest_parts(changed, mesh, least, memory, " ".join(names), say)
        if parts != config.gradient_accumulation:
            names = (*names, f"--gradient-accumulation {parts}")
        return Remedy(names, dataclasses.replace(plan, flops=flops_by_part(_in_parts(changed, parts))))
    return None


def _fewest_parts(
    config: RLTrainConfig, mesh: Mesh, least: Plan, memory: float, options: str, say: Callable[[str], object]
) -> tuple[int, Plan]:
    """The fewest parts that fit, given the plan of the most parts, which does.

    Scratch memory grows linearly with the rows, so two points tell where it reaches the limit.
    """
    most = config.batch_size // mesh.size
    divisors = [n for n in range(1, most + 1) if most % n == 0 and config.batch_size % n == 0]
    plans = {most: least}

    def fits(parts: int) -> bool:
        if parts not in plans:
            say(f"trying {options} --gradient-accumulation {parts}")
            plans[parts] = memory_plan(_in_parts(config, parts), mesh)
        return plans[parts].fits(memory)

    fewer = divisors[max(len(divisors) - 2, 0)]
    if not fits(fewer):
        return most, least
    each = (plans[fewer].scratch - least.scratch) / max(most // fewer - 1, 1)
    room = HEADROOM * memory - least.total
    best = next(n for n in divisors if (n == fewer or (most // n - 1) * each <= room) and fits(n))
    return best, plans[best]


def _in_parts(config: RLTrainConfig, parts: int) -> RLTrainConfig:
    return dataclasses.replace(config, gradient_accumulation=parts)
