"""Images on the device: convert bytes to floats, resize with padding, augment for training.

The same key gives the same augmented image as in OpenPI. OpenPI uses augmax, which works pixel by pixel; this is the
same arithmetic on whole planes, several times cheaper, and needs no augmax.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt8

CROP = 0.95
"""Side of the random crop, as a fraction of the image's side."""
MAX_ANGLE = 5.0
"""Largest rotation in degrees, in either direction."""
BRIGHTNESS, CONTRAST, HUE = 0.3, 0.4, 0.1
"""Largest changes of colour. OpenPI sets no hue and gets augmax's default; it sets saturation 0.5, which has no effect,
because augmax drops that result."""
JITTER_PROBABILITY = 0.5
"""Probability that a sample's colours change at all: a default of augmax."""


def to_float(images: UInt8[Array, "*b h w 3"] | Float[Array, "*b h w 3"]) -> Float[Array, "*b h w 3"]:
    """x / 255 · 2 − 1 for bytes. Floats are in [-1, 1] already and stay as they are."""
    if images.dtype == jnp.uint8:
        return images.astype(jnp.float32) / 255.0 * 2.0 - 1.0
    return images


def resize_with_pad(
    images: UInt8[Array, "*b _ _ c"] | Float[Array, "*b _ _ c"], height: int, width: int
) -> UInt8[Array, "*b {height} {width} c"] | Float[Array, "*b {height} {width} c"]:
    """Resize to fit, undistorted and antialiased, centred on black (0 for bytes, -1 for floats)."""
    old_height, old_width, channels = images.shape[-3:]
    if (old_height, old_width) == (height, width):
        return images
    ratio = max(old_width / width, old_height / height)
    new_height, new_width = int(old_height / ratio), int(old_width / ratio)
    resized = jax.image.resize(images, (*images.shape[:-3], new_height, new_width, channels), "linear")
    if images.dtype == jnp.uint8:
        resized, black = jnp.round(resized).clip(0, 255).astype(jnp.uint8), 0
    else:
        resized, black = resized.clip(-1.0, 1.0), -1
    top, left = (height - new_height) // 2, (width - new_width) // 2
    around = ((top, height - new_height - top), (left, width - new_width - left), (0, 0))
    return jnp.pad(resized, ((0, 0),) * (images.ndim - 3) + around, constant_values=black)


def augment(key: Key[Array, ""], images: dict[str, Float[Array, "b h w 3"]]) -> dict[str, Float[Array, "b h w 3"]]:
    """Crop, rotate and recolour images in [-1, 1]. Images of wrist cameras are only recoloured.

    All cameras use the same keys, one per sample.
    """
    return {name: _augment_camera(key, image, move="wrist" not in name) for name, image in images.items()}


def _augment_camera(key: Key[Array, ""], images: Float[Array, "b h w 3"], move: bool) -> Float[Array, "b h w 3"]:
    def augment_one(key: Key[Array, ""], image: Float[Array, "h w 3"]) -> Float[Array, "h w 3"]:
        # Here and below keys are split as in augmax's nested chains, so that a key gives the same image.
        if move:
            move_key, colour_key = jax.random.split(key)
            image = _crop_and_rotate(move_key, image)
        else:
            (colour_key,) = jax.random.split(key, 1)
        return _jitter_colours(colour_key, image)

    # Computed in [0, 1], where black is zero.
    return jax.vmap(augment_one)(jax.random.split(key, len(images)), images / 2.0 + 0.5) * 2.0 - 1.0


def _crop_and_rotate(key: Key[Array, ""], image: Float[Array, "h w 3"]) -> Float[Array, "h w 3"]:
    """Crop, resize and rotate by one bilinear look-up in the image. Outside of the image is black."""
    height, width = image.shape[:2]
    crop_height, crop_width = int(height * CROP), int(width * CROP)
    crop_key, _, angle_key = jax.random.split(key, 3)
    limit = jnp.array([(height - crop_height) / 2, (width - crop_width) / 2])
    centre = jax.random.uniform(crop_key, (2,), minval=-limit, maxval=limit)
    angle = jax.random.uniform(angle_key, minval=jnp.radians(-MAX_ANGLE), maxval=jnp.radians(MAX_ANGLE))

    middle_y, middle_x = height / 2 - 0.5, width / 2 - 0.5
    y, x = jnp.arange(height)[:, None] - middle_y, jnp.arange(width)[None, :] - middle_x
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    from_y = (crop_height / height) * (cos * y + sin * x) + centre[0] + middle_y
    from_x = (crop_width / width) * (cos * x - sin * y) + centre[1] + middle_x

    # With a black frame every neighbour exists, and everything farther out is black too.
    framed = jnp.pad(image, ((1, 1), (1, 1), (0, 0)))
    from_y, from_x = (from_y + 1).clip(0, height + 1), (from_x + 1).clip(0, width + 1)
    top, left = from_y.astype(jnp.int32).clip(max=height), from_x.astype(jnp.int32).clip(max=width)
    down, right = (from_y - top)[..., None], (from_x - left)[..., None]
    pixels = framed.reshape(-1, 3)

    def neighbour(step: int) -> Float[Array, "h w 3"]:
        return pixels.at[top * (width + 2) + left + step].get(mode="promise_in_bounds")

    upper = neighbour(0) * (1 - right) + neighbour(1) * right
    lower = neighbour(width + 2) * (1 - right) + neighbour(width + 3) * right
    return upper * (1 - down) + lower * down


def _jitter_colours(key: Key[Array, ""], image: Float[Array, "h w 3"]) -> Float[Array, "h w 3"]:
    """Change brightness, contrast and hue of an image in [0, 1], through hue, chroma and value."""
    (key,) = jax.random.split(key, 1)
    brightness_key, contrast_key, hue_key, _, _ = jax.random.split(key, 5)
    brightness = jax.random.uniform(brightness_key, minval=-BRIGHTNESS, maxval=BRIGHTNESS)
    contrast = jax.random.uniform(contrast_key, minval=-CONTRAST, maxval=CONTRAST)
    hue_shift = jax.random.uniform(hue_key, minval=-HUE, maxval=HUE)

    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    value = image.max(-1)
    chroma = value - image.min(-1)
    # Hue in sixths of a circle: red 0, green 2, blue 4, and from there towards the second strongest colour. If two
    # colours are equally strong, both formulas give the same hue: XLA may compute a channel twice and round it
    # differently, so either may be chosen.
    sixth = jnp.where(chroma == 0, 1, chroma)
    of_green, of_blue = 2 + (blue - red) / sixth, 4 + (red - green) / sixth
    hue = jnp.where((red >= green) & (red >= blue), (green - blue) / sixth, jnp.where(green >= blue, of_green, of_blue))
    saturation = chroma / jnp.where(value == 0, 1, value)

    value = jnp.where(brightness < 0, value * (1 + brightness), value * (1 - brightness) + brightness)
    value = _adjust_contrast(value, contrast)
    hue = hue + 6 * hue_shift

    corner = jnp.array([5, 3, 1]) + hue[..., None]
    corner = corner - 6 * jnp.floor(corner / 6)  # modulo 6, at half the cost of jnp.mod
    away = jnp.minimum(corner, 4 - corner).clip(0, 1)
    jittered = value[..., None] * (1 - saturation[..., None] * away)
    return jnp.where(jax.random.bernoulli(key, JITTER_PROBABILITY), jittered, image)


def _adjust_contrast(value: Float[Array, "h w"], contrast: Float[Array, ""]) -> Float[Array, "h w"]:
    """Apply a line of slope s = tan((contrast + 1)·π/4) through mid-grey, with slope 1/s towards 0 and 1."""
    slope = jnp.tan((contrast + 1) * (jnp.pi / 4))
    knee = slope / (2 * (1 + slope))
    middle = slope * (value - 0.5) + 0.5
    return jnp.where(value < knee, value / slope, jnp.where(value > 1 - knee, (value - 1) / slope + 1, middle))
