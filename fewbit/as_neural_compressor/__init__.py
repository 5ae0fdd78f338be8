"""`import neural_compressor.jax` made of `fewbit.keras`; nothing of Keras is imported here."""

from fewbit.as_neural_compressor._table import MODULES as MODULES
from fewbit.as_neural_compressor._table import NAME as NAME
from fewbit.as_neural_compressor._table import REFUSED as REFUSED
from fewbit.as_neural_compressor._table import install as install
