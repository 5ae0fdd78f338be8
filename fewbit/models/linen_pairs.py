"""A Linen module and its quantized twin, ready to run on one batch."""

from typing import Any

import flax.linen as nn

from fewbit.models.linen import Options, float_twin, make_run
from fewbit.models.pairs import Pair


def pair(
    module: nn.Module,
    quantized: nn.Module,
    provider: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: Any,
    rngs: Any,
    *,
    params: Any,
    qparams: Any,
) -> Pair:
    """`params` and `qparams` are whole variables; the collections beside 'params' may differ."""
    options = Options.of(method, False)
    runs = [
        make_run(float_twin(m), provider, variables, rngs, args, kwargs, options)
        for m, variables in ((quantized, qparams), (module, params))
    ]
    return Pair("linen", *runs[0], *runs[1])
