"""fewbit: JAX models with fewer bits, and the truth about it.

Trace a model, read the plan, quantize its parameters, run it:

>>> import fewbit, jax.numpy as jnp
>>> rules = [fewbit.QuantizationRule(module_path='.*', weight_qtype='int8', act_qtype='int8')]
>>> def f(params, x):
...     return jnp.tanh(x @ params['up']) @ params['down']
>>> params = {'up': jnp.eye(4), 'down': jnp.eye(4)}
>>> plan = fewbit.plan(f, rules, params, jnp.ones((1, 4)))
>>> qparams = fewbit.quantize_params(params, plan)
>>> fewbit.quantize_model(f, fewbit.PtqProvider(rules))(qparams, jnp.ones((1, 4))).shape
(1, 4)

Names are loaded when first used (`__init__.pyi` lists them), and a framework with the first model
of its kind.
"""

from fewbit._util import face as _face
from fewbit._version import __version__ as __version__


def _elsewhere(name: str) -> object:
    """Names that come later, or that are misspelt."""
    from fewbit._absent import resolve

    return resolve(name)


__getattr__, __dir__ = _face(__name__, _elsewhere)
