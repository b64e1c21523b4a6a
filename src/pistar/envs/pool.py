"""Environments of several tasks in one process, no more of them than it has room for."""

import contextlib

from pistar.envs.env import EnvOptions, Scene, StartEnv, find_scene, make_env


class Pool:
    """Gives each slot an environment of the task its next episode is of: one that is idle, else a new one.

    At most `slots + spare` are alive at any time. Where a new one needs room, the one idle for longest goes.
    """

    def __init__(self, options: EnvOptions, slots: int, spare: int = 0) -> None:
        self._options, self._slots, self._room = options, slots, slots + spare
        self._held: dict[int, tuple[str, StartEnv]] = {}
        """By slot, with the name of its task: those in the middle of an episode."""
        self._idle: list[tuple[str, StartEnv]] = []
        """The one used last is last."""

    def fill(self, name: str) -> Scene:
        """One of that task for every slot, ahead of their episodes."""
        self._idle = [(name, make_env(name, self._options)) for _ in range(self._slots)]
        return self._idle[0][1].scene

    def scene(self, name: str) -> Scene:
        """Of that task."""
        return find_scene(name, self._options)

    def take(self, slot: int, name: str) -> StartEnv:
        """One of that task, for an episode of the slot. An episode it has not ended is given up."""
        self.leave(slot)
        alike = [at for at, (kept, _) in enumerate(self._idle) if kept == name]
        if alike:
            found = self._idle.pop(alike[-1])
        else:
            while len(self._held) + len(self._idle) >= self._room:
                self._idle.pop(0)[1].close()
            found = (name, make_env(name, self._options))
        self._held[slot] = found
        return found[1]

    def held(self, slot: int) -> StartEnv:
        """The one it took."""
        if slot not in self._held:
            raise RuntimeError("begin an episode first")
        return self._held[slot][1]

    def leave(self, slot: int) -> None:
        """Its episode is over; others may have the environment."""
        if slot in self._held:
            self._idle.append(self._held.pop(slot))

    def drop(self, slot: int) -> None:
        """It failed: nobody should have it."""
        if slot in self._held:
            with contextlib.suppress(Exception):  # broken as it is, it may raise anything
                self._held.pop(slot)[1].close()

    def close(self) -> None:
        """All of them, also those in the middle of an episode."""
        for _, env in (*self._held.values(), *self._idle):
            env.close()
        self._held, self._idle = {}, []
