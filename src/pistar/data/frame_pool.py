"""The pictures of a few episodes at a time, in memory: for datasets whose frame cache would not fit on the disk.

While the episodes of one pool are drawn from, those of the next are decoded in the background; so about two pools are
in memory. A pool's pictures are the ones `frames.open_frames` would give, and who draws the same rows gets the same
batch from either.
"""

import dataclasses
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from jaxtyping import Int, UInt8

from pistar.data.frames import copy_rows, decode_resized
from pistar.data.lerobot import Dataset, EpisodeInfo
from pistar.errors import UserError

EpisodePictures = UInt8[np.ndarray, "_ size size 3"]


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeViews:
    """The pictures of some episodes, by row of all episodes. Keeps them in memory as long as it lives."""

    first_rows: Int[np.ndarray, " e"]
    """Of the episodes, in order."""
    pictures: Mapping[str, Sequence[EpisodePictures]]
    """By camera, then as `first_rows`."""

    def gather(
        self,
        camera: str,
        rows: Int[np.ndarray, " r"],
        out: UInt8[np.ndarray, "b size size 3"],
        places: Int[np.ndarray, " r"] | None = None,
    ) -> UInt8[np.ndarray, "b size size 3"]:
        """Copies of the pictures at `rows`, into `out[places]`."""
        which = np.searchsorted(self.first_rows, rows, side="right") - 1
        offsets = rows - self.first_rows[which]
        arrays = self.pictures[camera]
        lengths = np.array([len(array) for array in arrays])
        if len(rows) and not ((which >= 0) & (offsets < lengths[which])).all():
            raise IndexError(f"rows {rows.min()} to {rows.max()} are not all of these episodes")
        copy_rows(arrays, which, offsets, out, places)
        return out


class FramePool:
    """Decodes episodes as they are asked for, and forgets those that are not asked for any more."""

    def __init__(self, dataset: Dataset, cameras: Sequence[str], size: int, *, workers: int | None = None) -> None:
        """`workers`: cores to decode on; all if None."""
        if size < 1:
            raise UserError(f"Frames of size {size} do not exist; give the model's image size, such as 224.")
        dataset.require_videos(cameras)
        self._dataset, self.cameras, self.root, self.size = dataset, tuple(cameras), dataset.root, size
        count = workers or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="pool")
        self._lock = threading.Lock()
        self._decoded: dict[tuple[int, str], Future[EpisodePictures]] = {}
        self._claims: weakref.WeakKeyDictionary[object, frozenset[tuple[int, str]]] = weakref.WeakKeyDictionary()

    def view(self, episodes: Int[np.ndarray, " e"], upcoming: Int[np.ndarray, " f"], claimant: object) -> EpisodeViews:
        """The pictures of `episodes`, waited for; those of `upcoming` are begun; what nobody claims is forgotten.

        A claim lasts until the claimant's next, or its own end: several may draw from one pool.
        """
        now, later = np.sort(episodes), np.sort(upcoming)
        with self._lock:
            futures = {
                (int(index), camera): self._begin(int(index), camera)
                for index in (*now, *later)
                for camera in self.cameras
            }
            self._claims[claimant] = frozenset(futures)
            for key in self._decoded.keys() - frozenset().union(*self._claims.values()):
                del self._decoded[key]  # not cancelled: a batch of the pool before may still wait for it
        return EpisodeViews(
            np.array([self._dataset.episodes[index].from_row for index in now], np.int64),
            {camera: [futures[int(index), camera].result() for index in now] for camera in self.cameras},
        )

    def close(self) -> None:
        """Stop decoding."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, index: int, camera: str) -> "Future[EpisodePictures]":
        key = (index, camera)
        if key not in self._decoded:
            self._decoded[key] = self._pool.submit(self._decode, self._dataset.episodes[index], camera)
        return self._decoded[key]

    def _decode(self, episode: EpisodeInfo, camera: str) -> EpisodePictures:
        pictures = np.empty((episode.length, self.size, self.size, 3), np.uint8)
        for i, picture in enumerate(decode_resized(self._dataset, episode, camera, self.size)):
            pictures[i] = picture
        return pictures
