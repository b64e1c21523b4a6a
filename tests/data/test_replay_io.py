"""The replay buffer on disk: it is loaded as it was saved, and each file is written once."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

from data.test_replay import draw, episode, replay
from pistar.data.replay import ReplayBuffer
from pistar.data.replay_io import load_replay, redistribute, save_replay


def filled(buffer: ReplayBuffer, numbers: range) -> ReplayBuffer:
    for number in numbers:
        buffer.add(episode(number, 4 + number % 3, ("success", "failure", "timeout")[number % 3]))
    return buffer


def assert_comes_back(buffer: ReplayBuffer, folder: Path) -> ReplayBuffer:
    again = replay(20)
    again.refill(load_replay(folder, buffer.episodes))
    same = jax.tree.map(np.array_equal, draw(buffer, step=7), draw(again, step=7))
    assert jax.tree.all(same)
    assert [episode.number for episode in again.contents()] == [episode.number for episode in buffer.contents()]
    return again


def test_a_loaded_buffer_equals_the_saved_one_and_continues_like_it(tmp_path: Path) -> None:
    buffer = filled(replay(20), range(7))
    save_replay(tmp_path / "1", buffer.contents(), None)
    again = assert_comes_back(buffer, tmp_path / "1")
    filled(buffer, range(7, 9))
    filled(again, range(7, 9))
    assert jax.tree.all(jax.tree.map(np.array_equal, draw(buffer), draw(again)))
    assert [episode.number for episode in again.contents()] == [episode.number for episode in buffer.contents()]


def test_files_of_an_earlier_checkpoint_are_linked_while_the_buffer_holds_their_episodes(tmp_path: Path) -> None:
    buffer, steps = replay(20), [tmp_path / str(step) for step in range(4)]
    for step, folder in enumerate(steps):
        filled(buffer, range(2 * step, 2 * step + 2))
        save_replay(folder, buffer.contents(), steps[step - 1] if step else None)
        assert_comes_back(buffer, folder)
    names = [sorted(file.name for file in folder.iterdir()) for folder in steps]
    # The buffer holds 20 steps. A file is linked while the buffer holds one of its episodes.
    assert [len(each) for each in names] == [1, 2, 2, 2]
    assert names[1][0] == names[0][0]
    assert (steps[1] / names[0][0]).stat().st_nlink == 2
    assert names[0][0] not in names[2]


def test_without_links_everything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    buffer = filled(replay(20), range(2))
    save_replay(tmp_path / "1", buffer.contents(), None)
    filled(buffer, range(2, 4))
    save_replay(tmp_path / "2", buffer.contents(), tmp_path / "1")
    assert_comes_back(buffer, tmp_path / "2")


def test_an_empty_buffer_is_saved_too(tmp_path: Path) -> None:
    save_replay(tmp_path / "1", (), None)
    assert load_replay(tmp_path / "1", 0) == []


def test_the_buffers_of_two_hosts_are_redistributed_to_three() -> None:
    buffers = [filled(replay(30), range(5)).contents(), filled(replay(30), range(5, 7)).contents()]
    dealt = [redistribute(buffers, host, 3) for host in range(3)]
    assert [[episode.number for episode in each] for each in dealt] == [[0, 1, 2], [0, 1, 2], [0]]
    states = sorted(episode.state.tobytes() for each in dealt for episode in each)
    assert states == sorted(episode.state.tobytes() for each in buffers for episode in each)
