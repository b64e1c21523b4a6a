"""Inspect ALOHA's HDF5 files before anything is converted: what each holds, and whether they fit in one dataset."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pistar.data.hdf5.files import (
    CHUNK_STEPS,
    IMAGE_STEPS,
    IMAGES,
    chunk_steps,
    dataset_names,
    image_steps,
    opened,
    read_images,
    read_numbers,
)
from pistar.data.success_sources import folder_score
from pistar.errors import UserError
from pistar.text import counted

NUMBERS = {
    "action": "action",
    "observation.state": "observations/qpos",
    "observation.velocity": "observations/qvel",
    "observation.effort": "observations/effort",
}
"""LeRobot's columns, named as OpenPI's converter does, and their keys in ALOHA's files."""
OPTIONAL = ("observation.velocity", "observation.effort")
IMAGE_COLUMN = "observation.images.{}"
# No "observation." in front: LeRobot's policies would take these as inputs.
NEW_IMAGE, CHUNK_START = "is_new_image", "is_chunk_start"
FLAGS = {NEW_IMAGE: IMAGE_STEPS, CHUNK_START: CHUNK_STEPS}
"""Columns that mark steps, and the keys in ALOHA's files that list these steps."""


@dataclasses.dataclass(frozen=True)
class EpisodeFile:
    """What one HDF5 file holds."""

    path: Path
    score: int | None
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of one frame's value, by LeRobot's column."""
    cameras: tuple[str, ...]
    flags: tuple[str, ...]
    """Which of FLAGS the file has."""
    skipped_steps: int
    """Steps before the first image."""
    left_out: tuple[str, ...]
    """Keys that no column is made from."""


def find_files(folder: Path) -> list[Path]:
    """List all *.hdf5 and *.h5 files below a folder, in natural order: episode_2 before episode_10."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the one with the episodes, or with their score_… folders.")
    paths = [path for path in folder.rglob("*") if path.suffix in (".hdf5", ".h5") and not path.name.startswith(".")]
    if not paths:
        raise UserError(f"{folder} and its subfolders hold no *.hdf5 files; name the folder with the episodes.")
    return sorted(paths, key=lambda path: [(int(n or 0), s) for n, s in re.findall(r"(\d+)|(\D+)", str(path))])


def file_score(folder: Path, path: Path) -> int:
    """Return the score in the name of the file's folder. Folders above the one the user named do not count."""
    below = str(Path(folder.resolve().name) / path.parent.relative_to(folder))
    try:
        return folder_score(below)
    except UserError:
        raise UserError(
            f"{below} has no score in its name; put the episodes in folders named score_0, score_1 …, "
            "or say how all of them ended: --without-scores success (in Python scores='success')."
        ) from None


def inspect_file(path: Path, cameras: Sequence[str] | None, episode_score: int | None) -> EpisodeFile:
    """Read a file's numbers and the size of its images, and refuse it if it is not a complete ALOHA episode."""
    with opened(path) as root:
        datasets = dataset_names(root)
        for name, key in NUMBERS.items():
            if name not in OPTIONAL and key not in datasets:
                raise UserError(
                    f"{path} has no /{key}; it has {', '.join(datasets) or 'nothing'}: is it an ALOHA episode?"
                )
        present = {name: key for name, key in NUMBERS.items() if key in datasets}
        shapes = {name: read_numbers(root, path, key).shape[1:] for name, key in present.items()}
        stored_cameras = [key.removeprefix(f"{IMAGES}/") for key in datasets if key.startswith(f"{IMAGES}/")]
        if cameras is None and not stored_cameras:
            raise UserError(
                f"{path} has no /{IMAGES}; for a dataset without images call convert_hdf5(…, cameras=()) in Python."
            )
        wanted = [name for name in stored_cameras if "depth" not in name] if cameras is None else list(cameras)
        steps = image_steps(root, path)
        for camera in wanted:
            if camera not in stored_cameras:
                raise UserError(f"{path} has no camera {camera!r}; it has {', '.join(stored_cameras) or 'none'}.")
            stored = root[IMAGES][camera]
            if len(stored) != len(steps):
                counterpart = f"/{IMAGE_STEPS}" if IMAGE_STEPS in root else "actions"
                raise UserError(
                    f"{path} has {len(stored)} images of {camera} for {len(steps)} {counterpart}; the counts must "
                    "match: repair the file or leave it out."
                )
            shapes[IMAGE_COLUMN.format(camera)] = next(read_images(stored, path, camera)).shape
        chunk_steps(root, path)  # refuses steps that are out of range
        used = {*NUMBERS.values(), *FLAGS.values(), *(f"{IMAGES}/{camera}" for camera in wanted), "compress_len"}
        return EpisodeFile(
            path=path,
            score=episode_score,
            shapes=shapes,
            cameras=tuple(wanted),
            flags=tuple(name for name, key in FLAGS.items() if key in root),
            skipped_steps=int(steps[0]) if wanted else 0,
            left_out=tuple(key for key in datasets if key not in used),
        )


def check_same_robot(files: Sequence[EpisodeFile]) -> None:
    """Refuse files whose columns or image sizes differ from the first file's."""
    first = files[0]
    for file in files[1:]:
        for name in sorted(first.shapes.keys() | file.shapes.keys()):
            shape, expected = file.shapes.get(name), first.shapes.get(name)
            if shape == expected or (name in OPTIONAL and None in (shape, expected)):
                continue
            raise UserError(
                f"{file.path} has {shape or 'nothing'} for {name}, {first.path} has {expected or 'nothing'}; all "
                "episodes of a dataset must come from one robot: convert them separately (or, in Python, name the "
                "cameras they share in convert_hdf5's `cameras`)."
            )


def left_out_notes(files: Sequence[EpisodeFile], columns: Sequence[str]) -> Iterator[str]:
    """Say what the dataset leaves out of the files, one line each."""
    late = [file for file in files if file.skipped_steps]
    if late:
        steps = sum(file.skipped_steps for file in late)
        skipped = f"{counted(steps, 'step')} of {counted(len(late), 'episode')}"
        yield f"{skipped} came before the first image and {'is' if steps == 1 else 'are'} left out."
    for name in OPTIONAL:
        having = sum(name in file.shapes for file in files)
        if having and name not in columns:
            yield f"/{NUMBERS[name]} is in only {having} of {counted(len(files), 'file')} and is left out."
    for key, count in collections.Counter(key for file in files for key in file.left_out).items():
        yield f"/{key} of {counted(count, 'file')} has no place in the dataset and is left out."
