import jax.numpy as jnp
import numpy as np

from pistar.agents.estimators import ema


def test_ema_keeps_its_share_of_the_old_and_the_dtype() -> None:
    old = {"w": jnp.array([1.0, 2.0]), "frozen": jnp.ones(1, jnp.bfloat16)}
    new = {"w": jnp.array([3.0, 6.0]), "frozen": jnp.ones(1, jnp.bfloat16)}
    averaged = ema(old, new, 0.75)
    np.testing.assert_allclose(averaged["w"], [1.5, 3.0])
    assert averaged["frozen"].dtype == jnp.bfloat16
