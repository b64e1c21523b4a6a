"""Which room of `src/pistar` may import which: the rule that a test enforces and the architecture page shows."""

LAYERS = (
    ("types", "errors", "text", "tables", "optim"),
    ("models",),
    ("agents", "data", "envs"),
    ("config",),
    ("distributed",),
    ("telemetry",),
    ("checkpoints",),
    ("policy",),
    ("evaluation", "planning"),
    ("training",),
    ("online",),
    ("report", "serving"),
    ("demo", "sweep"),
    ("cli",),
)
"""Rooms, lowest layer first. A room may import from lower layers; rooms of the lowest layer may import each other."""

ROOMS = {
    "types": "Shapes that cross from one room to another.",
    "errors": "The one exception a user sees.",
    "text": "Numbers and lists written as text.",
    "tables": "Dataclasses from YAML and JSON tables, and back.",
    "optim": "Optimisers and learning-rate schedules.",
    "models": "π₀, π₀.₅ and the critic. The only room that knows OpenPI's parameter names.",
    "agents": "One algorithm per file: losses, state, update. No disk, no printing, no tracker.",
    "data": "Datasets, robots, normalisation, rewards, windows, batches and the replay buffer.",
    "envs": "Simulators, one family per file, and many of them at once over workers that may fail.",
    "config": "The settings of a run, the presets, and the settings of other programs translated into ours.",
    "distributed": "Devices and hosts: how the state is split, and how hosts work together.",
    "telemetry": "Metrics, progress and memory of a run.",
    "checkpoints": "Checkpoints read, written, verified and converted.",
    "policy": "A checkpoint that acts: from an observation to actions.",
    "evaluation": "Success counts, intervals and comparisons.",
    "planning": "Memory and FLOPs of a run before anything is allocated.",
    "training": "The offline training loop, the set-up of a run, and the critic's audit.",
    "online": "The online training loop: collect rollouts, update, evaluate, check the run's health.",
    "report": "Charts, contact sheets and videos.",
    "serving": "The policy server that robots talk to.",
    "demo": "The demo.",
    "sweep": "Comparisons of settings over seeds.",
    "cli": "The commands: parse, call, print.",
}
"""What each room is for."""


def allowed_imports(room: str) -> set[str]:
    """Rooms that this one may import from."""
    row = next(row for row, rooms in enumerate(LAYERS) if room in rooms)
    return {name for rooms in LAYERS[: max(row, 1)] for name in rooms}
