"""The cost of splitting a run over devices, and the memory of a full-size run on each.

    python benchmarks/scaling.py [--devices 8] [--steps 3] [--skip-full]

One ACRLPD update of a small π₀ in full-size proportions, in CPU seconds over all threads: on one device; on N virtual
devices with the state split over them; on N virtual devices with a copy of the state on each; and on one device with
gradients accumulated over four parts. The four are timed alternately, so that their ratios mean something on a shared
machine. Virtual devices share its cores and its memory: they show the work that splitting adds, not the network's time.

Then rl_fold_box at full size: compiled for N devices without allocating anything, with XLA's memory analysis. This
takes about a minute and 2 GB; everything together about five minutes.
"""

import argparse
import dataclasses
import json
import statistics
import time
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from pistar.agents.base import abstract_state
from pistar.config.presets import get_config
from pistar.distributed import sharding
from pistar.distributed.sharding import batch_sharding, device_bytes, make_mesh, replicated, state_sharding
from pistar.planning.plan import make_plan, pretend_devices
from train_step import acrlpd, fresh_state, random_batch, windows

from prefix_sharing import BENCH


def one_device() -> Mesh:
    """A mesh of one device, whatever the number of devices."""
    axes = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((1, 1), (sharding.BATCH, sharding.FSDP), devices=jax.devices()[:1], axis_types=axes)


class Kind:
    """A compiled update on a mesh, which continues from its last state."""

    def __init__(self, mesh: Mesh, rows: int, accumulation: int = 1) -> None:
        agent = dataclasses.replace(acrlpd(BENCH, 64), accumulation=accumulation)
        batch = jax.device_get(windows(random_batch(BENCH, rows)))
        self.mesh, self.batch = mesh, jax.device_put(batch, batch_sharding(mesh))
        where = state_sharding(abstract_state(agent), mesh)
        self.state = jax.jit(lambda: fresh_state(agent), out_shardings=where)()
        self.update = jax.jit(agent.update, donate_argnums=0, out_shardings=(where, replicated(mesh)))
        self.held = device_bytes(self.state)
        self.times: list[float] = []
        self.step()
        self.times.clear()  # the first one compiles

    def step(self) -> None:
        """One update, timed."""
        start = time.process_time()
        with jax.set_mesh(self.mesh):
            made: Any = self.update(self.state, self.batch, jax.random.key(0))
        self.state = jax.block_until_ready(made)[0]  # type: ignore[no-untyped-call]
        self.times.append(time.process_time() - start)


def main() -> None:
    """Time all kinds alternately; then plan at full size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="and rows of a batch: a multiple of 4")
    parser.add_argument("--steps", type=int, default=3, help="of each kind; the median counts")
    parser.add_argument("--skip-full", action="store_true", help="leave out the full-size compilation")
    args = parser.parse_args()
    pretend_devices(args.devices)
    sharding.SMALL = 4096  # or nothing of such a small model would be split
    kinds = {
        "one device": Kind(one_device(), args.devices),
        f"split over {args.devices}": Kind(make_mesh(args.devices), args.devices),
        "whole on each": Kind(make_mesh(1), args.devices),
        "one device, in 4 parts": Kind(one_device(), args.devices, accumulation=4),
    }
    for _ in range(args.steps):
        for kind in kinds.values():
            kind.step()
    seconds = {name: statistics.median(kind.times) for name, kind in kinds.items()}
    base = seconds["one device"]
    print(f"ACRLPD update of a batch of {args.devices}, CPU seconds, median of {args.steps}")
    for name, kind in kinds.items():
        print(f"  {name:28} {seconds[name]:8.3f}  × {seconds[name] / base:5.2f}   {kind.held / 1e6:8.2f} MB of state")
    whole, split, copies, parts = seconds.values()
    held = [kind.held for kind in kinds.values()]
    result: dict[str, object] = {
        "benchmark": "scaling",
        "devices": args.devices,
        "split_over_one": round(split / whole, 3),
        "copies_over_one": round(copies / whole, 3),
        "accumulated_over_one": round(parts / whole, 3),
        "state_bytes_split_over_whole": round(held[1] / held[0], 4),
    }
    if not args.skip_full:
        sharding.SMALL = 4 * 2**20
        start = time.perf_counter()
        config = dataclasses.replace(get_config("rl_fold_box"), batch_size=16 * args.devices)
        plan = make_plan(config, make_mesh())
        taken = time.perf_counter() - start
        print(
            f"rl_fold_box at full size on {args.devices} devices, 16 rows each, compiled in {taken:.0f} s; GB on each:"
        )
        for name, size in plan.parts.items():
            print(f"  {name:28} {size / 1e9:8.3f}")
        print(f"  {'together':28} {plan.total / 1e9:8.3f}")
        result |= {"full_seconds": round(taken, 1), "full_gb_per_device": round(plan.total / 1e9, 2)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
