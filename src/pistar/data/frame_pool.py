"""The frames of a few episodes at a time, in memory: for datasets whose frame cache does not fit on the disk.

While batches are drawn from the episodes of one pool, those of the next are decoded in the background, so about two
pools are in memory. The frames are the same as those of `frame_cache.open_frames`, and so are the batches.
"""

import dataclasses
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from jaxtyping import Int, UInt8

from pistar.data.frame_cache import check_decodable, copy_rows, decode_resized
from pistar.data.lerobot.dataset import Dataset, EpisodeInfo

EpisodeImages = UInt8[np.ndarray, "_ size size 3"]


@dataclasses.dataclass(frozen=True, eq=False)
class EpisodeFrames:
    """The frames of some episodes, by row of the whole dataset. They stay in memory as long as this object."""

    first_rows: Int[np.ndarray, " e"]
    """The first row of each episode, in order."""
    images: Mapping[str, Sequence[EpisodeImages]]
    """By camera, one array per episode, as `first_rows`."""

    def gather(
        self,
        camera: str,
        rows: Int[np.ndarray, " r"],
        out: UInt8[np.ndarray, "b size size 3"],
        places: Int[np.ndarray, " r"] | None = None,
    ) -> UInt8[np.ndarray, "b size size 3"]:
        """Copy the frames at `rows` into `out[places]`."""
        which = np.searchsorted(self.first_rows, rows, side="right") - 1
        offsets = rows - self.first_rows[which]
        arrays = self.images[camera]
        lengths = np.array([len(array) for array in arrays])
        if len(rows) and not ((which >= 0) & (offsets < lengths[which])).all():
            raise IndexError(f"rows {rows.min()} to {rows.max()} are not all in these episodes")
        copy_rows(arrays, which, offsets, out, places)
        return out


class FramePool:
    """Decodes episodes when they are needed, and drops those that are not needed any more."""

    def __init__(self, dataset: Dataset, cameras: Sequence[str], size: int, *, workers: int | None = None) -> None:
        """Decode on `workers` cores; on all cores if None."""
        check_decodable(dataset, cameras, size)
        self._dataset, self.cameras, self.root, self.size = dataset, tuple(cameras), dataset.root, size
        count = workers or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="pool")
        self._lock = threading.Lock()
        self._decoded: dict[tuple[int, str], Future[EpisodeImages]] = {}
        self._claims: weakref.WeakKeyDictionary[object, frozenset[tuple[int, str]]] = weakref.WeakKeyDictionary()

    def view(self, episodes: Int[np.ndarray, " e"], upcoming: Int[np.ndarray, " f"], claimant: object) -> EpisodeFrames:
        """Wait for the frames of `episodes`, start decoding those of `upcoming`, and drop unclaimed ones.

        A claim lasts until the claimant's next call or until the claimant is deleted, so several can use one pool.
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
                del self._decoded[key]  # not cancelled: a batch of the previous pool may still wait for it
        return EpisodeFrames(
            np.array([self._dataset.episodes[index].from_row for index in now], np.int64),
            {camera: [futures[int(index), camera].result() for index in now] for camera in self.cameras},
        )

    def close(self) -> None:
        """Stop decoding."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, index: int, camera: str) -> "Future[EpisodeImages]":
        key = (index, camera)
        if key not in self._decoded:
            self._decoded[key] = self._pool.submit(self._decode, self._dataset.episodes[index], camera)
        return self._decoded[key]

    def _decode(self, episode: EpisodeInfo, camera: str) -> EpisodeImages:
        images = np.empty((episode.length, self.size, self.size, 3), np.uint8)
        for i, image in enumerate(decode_resized(self._dataset, episode, camera, self.size)):
            images[i] = image
        return images
