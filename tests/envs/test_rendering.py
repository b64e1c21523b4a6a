"""What is no picture of a scene is not taken for one."""

import numpy as np
import pytest

from pistar.envs.rendering import PictureCheck
from pistar.errors import UserError

SCENE = np.add.outer(np.arange(32), np.arange(32))[..., None].repeat(3, axis=2).astype(np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
EMPTY = np.full((32, 32, 3), 7, np.uint8)


@pytest.mark.parametrize(("picture", "says"), [(EMPTY, "one colour only"), (NOISE, "renders noise")])
def test_a_camera_that_never_worked_is_the_users_and_one_that_breaks_is_the_episodes(
    picture: np.ndarray, says: str
) -> None:
    check = PictureCheck("a scene")
    check("left", SCENE)
    with pytest.raises(UserError, match=f"Camera right of a scene.*{says}"):
        check("right", picture)
    with pytest.raises(RuntimeError, match=f"Camera left of a scene.*{says}"):
        check("left", picture)
    check("left", SCENE)
