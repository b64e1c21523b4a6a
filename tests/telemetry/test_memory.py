"""Memory in use at named moments."""

import jax.numpy as jnp

from pistar.telemetry.memory import MemoryMonitor, resident_bytes


def test_a_moment_counts_live_arrays_by_component() -> None:
    monitor = MemoryMonitor()
    before = monitor.mark("before")
    held = {"weights": jnp.ones((1024, 1024)), "step": jnp.int32(3)}
    after = monitor.mark("after", {"state": held, "batch": []})
    assert after.components == {"state": 4 * 1024 * 1024 + 4, "batch": 0}
    assert after.arrays - before.arrays >= 4 * 1024 * 1024
    assert after.host_peak >= after.host > 0
    first, second = monitor.report()
    assert first.startswith("memory in MB, before: host ")
    assert second.partition(", others ")[0].endswith(": state 4.2, batch 0.0")


def test_peak_memory_is_at_least_resident_memory() -> None:
    now, peak = resident_bytes()
    assert peak >= now > 10e6
