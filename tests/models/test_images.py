from pathlib import Path

import augmax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pistar.models.images import augment, resize_with_pad, to_float

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
RESIZE = jax.jit(resize_with_pad, static_argnums=(1, 2))
AUGMENT = jax.jit(augment)
SIZES = ((56, 56), (20, 20), (24, 50), (30, 40))


@pytest.fixture(scope="module")
def misc(openpi_goldens: Path) -> dict[str, np.ndarray]:
    with np.load(openpi_goldens / "misc.npz") as file:
        return {key: file[key] for key in file if key.startswith(("resize/", "augment_key5/"))}


def augmax_augment(key: jax.Array, image: jax.Array, wrist: bool) -> jax.Array:
    height, width = image.shape[1:3]
    moves = [augmax.RandomCrop(int(width * 0.95), int(height * 0.95)), augmax.Resize(width, height), augmax.Rotate(5)]
    colours = augmax.ColorJitter(brightness=0.3, contrast=0.4, saturation=0.5)
    chain = augmax.Chain(*([] if wrist else moves), colours)
    out: jax.Array = jax.vmap(chain)(jax.random.split(key, len(image)), image / 2 + 0.5) * 2 - 1
    return out


def test_bytes_become_floats_between_minus_one_and_one() -> None:
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    expected = pixels.astype(np.float32) / 255.0 * 2.0 - 1.0
    # XLA multiplies by 1/255: up to two roundings away from numpy's division.
    np.testing.assert_allclose(jax.jit(to_float)(pixels), expected, atol=1.3e-7, rtol=0)
    assert to_float(jnp.zeros((1, 1, 3), jnp.uint8)).max() == -1
    assert to_float(jnp.full((1, 1, 3), 255, jnp.uint8)).min() == 1


def test_floats_pass_unchanged() -> None:
    image = jnp.full((2, 4, 4, 3), 0.25)
    assert to_float(image) is image


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_resized_bytes_equal_openpis(misc: dict[str, np.ndarray], height: int, width: int) -> None:
    ours = RESIZE(jnp.asarray(misc["resize/in_u8"]), height, width)
    expected = misc[f"resize/jax_u8_{height}x{width}"]
    assert ours.dtype == jnp.uint8
    # Interpolation gives many halves, and the last bit decides how they round: compare before rounding.
    unrounded = (misc[f"resize/jax_f32_{height}x{width}"].astype(np.float64) + 1) / 2 * 255
    off = np.asarray(ours) != expected
    np.testing.assert_allclose(np.abs(unrounded[off] - np.floor(unrounded[off])), 0.5, atol=1e-4)
    assert np.abs(np.asarray(ours).astype(int) - expected).max() <= 1
    assert off.mean() < 0.02


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_resized_floats_equal_openpis(misc: dict[str, np.ndarray], height: int, width: int) -> None:
    floats = to_float(jnp.asarray(misc["resize/in_u8"]))
    np.testing.assert_allclose(RESIZE(floats, height, width), misc[f"resize/jax_f32_{height}x{width}"], atol=2e-6)


def test_a_single_picture_resizes_like_a_batch() -> None:
    image = jnp.asarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8))
    np.testing.assert_array_equal(resize_with_pad(image, 5, 8), resize_with_pad(image[None], 5, 8)[0])


def test_augmentation_equals_openpis_for_the_same_key(misc: dict[str, np.ndarray]) -> None:
    images = {name: to_float(jnp.asarray(misc[f"augment_key5/in_u8/{name}"])) for name in CAMERAS}
    ours = AUGMENT(jax.random.key(5), images)
    for name in CAMERAS:
        # Half of the last digit of float16, in which the expected images are stored, plus our own rounding.
        np.testing.assert_allclose(ours[name], misc[f"augment_key5/out_f16/{name}"], atol=3e-4, rtol=0)


@pytest.mark.parametrize("camera", ["base_0_rgb", "left_wrist_0_rgb"])
def test_augmentation_equals_augmax_on_wide_pictures(camera: str) -> None:
    rng = np.random.default_rng(1)
    image = rng.uniform(-1, 1, (16, 20, 32, 3)).astype(np.float32)
    image[3] = -1.0  # black: no hue
    image[5] = image[5, ..., :1]  # grey: no chroma
    image[7] = np.where(rng.uniform(size=(20, 32, 1)) < 0.5, image[7], np.roll(image[7], 1, -1).round())
    key = jax.random.key(2)
    ours = AUGMENT(key, {camera: jnp.asarray(image)})[camera]
    theirs = jax.jit(augmax_augment, static_argnums=2)(key, jnp.asarray(image), "wrist" in camera)
    np.testing.assert_allclose(ours, theirs, atol=5e-5, rtol=0)


def test_about_half_of_the_wrist_pictures_keep_their_colours() -> None:
    image = jnp.asarray(np.random.default_rng(2).uniform(-1, 1, (200, 2, 2, 3)).astype(np.float32))
    out = AUGMENT(jax.random.key(0), {"left_wrist_0_rgb": image})["left_wrist_0_rgb"]
    kept = (jnp.abs(out - image) < 1e-6).all(axis=(1, 2, 3)).mean()
    assert 0.4 < kept < 0.6


def test_cameras_of_one_sample_are_augmented_alike() -> None:
    image = jnp.asarray(np.random.default_rng(3).uniform(-1, 1, (4, 20, 20, 3)).astype(np.float32))
    out = AUGMENT(jax.random.key(0), {"base_0_rgb": image, "base_1_rgb": image})
    np.testing.assert_array_equal(out["base_0_rgb"], out["base_1_rgb"])
    assert not np.allclose(out["base_0_rgb"], image)


def test_augmented_pictures_stay_between_black_and_white() -> None:
    image = jnp.asarray(np.random.default_rng(4).choice([-1.0, 1.0], (64, 8, 8, 3)).astype(np.float32))
    for name, out in AUGMENT(jax.random.key(0), {"base_0_rgb": image, "left_wrist_0_rgb": image}).items():
        assert -1 - 1e-5 < out.min() <= out.max() < 1 + 1e-5, name
