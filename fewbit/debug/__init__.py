"""See what quantization did to a model: compare, bisect; and does to training: training_stats.

>>> import fewbit.debug
>>> fewbit.debug.compare, fewbit.debug.bisect
(<function compare at ...>, <function bisect at ...>)
"""

from fewbit.debug._bisect import Bisection as Bisection
from fewbit.debug._bisect import bisect as bisect
from fewbit.debug._compare import compare as compare
from fewbit.debug._comparison import Comparison as Comparison
from fewbit.debug._comparison import LayerError as LayerError
from fewbit.debug._comparison import SiteError as SiteError
from fewbit.debug._stored import Report as Report
from fewbit.debug._stored import report as report
from fewbit.debug._training import TrainingHistory as TrainingHistory
from fewbit.debug._training import TrainingStats as TrainingStats
from fewbit.debug._training import training_stats as training_stats
from fewbit.debug.page._page import html_report as html_report
