"""What watches operands while a model runs; `fewbit.calibration` has the rest of it."""

from fewbit.calibration import Observer as Observer
from fewbit.calibration import Operand as Operand
from fewbit.calibration import observer_named as observer_named
from fewbit.calibration import register_observer as register_observer
