"""The environments of one process, of several tasks, and never more of them than it has room for."""

import contextlib

from pistar.envs.base import EnvOptions, Scene, StartEnv, find_scene, make_env


class EnvPool:
    """Gives each slot an environment of its episode's task: an idle one, or else a new one.

    At most `slots + spare` are alive at any time. To make room, the one that has been idle longest is closed.
    """

    def __init__(self, options: EnvOptions, slots: int, spare: int = 0) -> None:
        self._options, self._slots, self._room = options, slots, slots + spare
        self._in_use: dict[int, tuple[str, StartEnv]] = {}
        """Task and environment of each slot in the middle of an episode."""
        self._idle: list[tuple[str, StartEnv]] = []
        """The most recently used comes last."""

    def fill(self, name: str) -> Scene:
        """Build an environment of that task for every slot in advance."""
        self._idle = [(name, make_env(name, self._options)) for _ in range(self._slots)]
        return self._idle[0][1].scene

    def scene(self, name: str) -> Scene:
        """Describe a task."""
        return find_scene(name, self._options)

    def acquire(self, slot: int, name: str) -> StartEnv:
        """Give the slot an environment of that task. An episode the slot has not finished is abandoned."""
        self.release(slot)
        same_task = [index for index, (task, _) in enumerate(self._idle) if task == name]
        if same_task:
            entry = self._idle.pop(same_task[-1])
        else:
            while len(self._in_use) + len(self._idle) >= self._room:
                self._idle.pop(0)[1].close()
            entry = (name, make_env(name, self._options))
        self._in_use[slot] = entry
        return entry[1]

    def current(self, slot: int) -> StartEnv:
        """Return the slot's environment."""
        if slot not in self._in_use:
            raise RuntimeError("begin an episode first")
        return self._in_use[slot][1]

    def release(self, slot: int) -> None:
        """Make the slot's environment idle: its episode is over."""
        if slot in self._in_use:
            self._idle.append(self._in_use.pop(slot))

    def discard(self, slot: int) -> None:
        """Close the slot's environment, which has failed, so that it is not used again."""
        if slot in self._in_use:
            with contextlib.suppress(Exception):  # a broken simulator may raise anything
                self._in_use.pop(slot)[1].close()

    def close(self) -> None:
        """Close all environments, also those in the middle of an episode."""
        for _, env in (*self._in_use.values(), *self._idle):
            env.close()
        self._in_use, self._idle = {}, []
