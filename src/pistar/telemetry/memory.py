"""Measured memory of a run: what the host and the devices hold at named moments, by component."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax

from pistar.distributed.sharding import device_bytes


@dataclasses.dataclass(frozen=True)
class Moment:
    """Memory in use at a named moment, in bytes."""

    name: str
    host: int
    """Resident memory of this process."""
    host_peak: int
    """Its peak so far."""
    arrays: int
    """Live JAX arrays on the fullest device of this host."""
    device: int | None
    """Memory in use on that device as its driver counts it; None if the backend does not report it."""
    device_peak: int | None
    components: dict[str, int]
    """Bytes on that device, by component."""


class MemoryMonitor:
    """Measures memory when `mark` is called."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def mark(self, name: str, components: Mapping[str, object] | None = None) -> Moment:
        """Measure now. `components` are trees of arrays, each counted by itself."""
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        host, peak = resident_bytes()
        moment = Moment(
            name=name,
            host=host,
            host_peak=peak,
            arrays=device_bytes(jax.live_arrays()),  # type: ignore[no-untyped-call]
            device=max((s["bytes_in_use"] for s in stats if "bytes_in_use" in s), default=None),
            device_peak=max((s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s), default=None),
            components={part: device_bytes(tree) for part, tree in (components or {}).items()},
        )
        self.moments.append(moment)
        return moment

    def report(self) -> list[str]:
        """One line per moment, in megabytes."""
        lines = []
        for moment in self.moments:
            device = (
                "" if moment.device is None else f", device {_mb(moment.device)} (peak {_mb(moment.device_peak or 0)})"
            )
            host = f"host {_mb(moment.host)} (peak {_mb(moment.host_peak)})"
            held = f"{host}, arrays on a device {_mb(moment.arrays)}{device}"
            named = dict(moment.components)
            if named:
                named["others"] = max(moment.arrays - sum(named.values()), 0)
            parts = ", ".join(f"{name} {_mb(size)}" for name, size in named.items())
            lines.append(f"memory in MB, {moment.name}: {held}{': ' if parts else ''}{parts}")
        return lines


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"


def resident_bytes() -> tuple[int, int]:
    """Resident memory of this process, now and at its peak; zeros if the system does not report it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # not Linux
        return 0, 0
    lines = dict(line.split(":", 1) for line in status.splitlines())
    return tuple(1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
