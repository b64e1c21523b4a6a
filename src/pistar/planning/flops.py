"""FLOPs of a program, counted from its jaxpr: loops as often as they run; nothing is compiled or allocated.

XLA's own cost analysis counts a loop's body once, and π₀ is loops over layers and Euler steps.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core


def count_flops(function: Callable[..., Any], *args: Any) -> int:  # noqa: ANN401  # arrays, or shapes in their place
    """Count floating-point operations of matrix products and convolutions, two per multiply-add.

    Everything else (norms, softmax, activations) is left out, as is the custom of the field; in a transformer it is a
    few per cent.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: core.Jaxpr) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        summed: int = math.prod(_shape(equation.invars[0])[axis] for axis in contracting)
        return 2 * summed * math.prod(_shape(equation.outvars[0]))
    if name == "conv_general_dilated":
        kernel = _shape(equation.invars[1])
        out_channels: int = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(kernel) // out_channels * math.prod(_shape(equation.outvars[0]))
    if name == "while":
        raise ValueError("a while loop runs an unknown number of times; count a scan of fixed length instead")
    inner = [_count(sub) for sub in core.jaxprs_in_params(params)]
    if name == "cond":
        return max(inner)  # one branch runs, and which is not known
    times = params["length"] if name == "scan" else 1
    return times * sum(inner)


def _shape(variable: core.Var | core.Literal) -> tuple[int, ...]:
    shape: tuple[int, ...] = variable.aval.shape  # type: ignore[attr-defined]
    return shape
