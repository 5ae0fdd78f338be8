"""A jaxpr's Sites, and which parameter each operand is."""

from fewbit.tracing import _jaxprs as jaxprs
from fewbit.tracing._jaxprs import LEFT_FLOAT as LEFT_FLOAT
from fewbit.tracing._jaxprs import Eqn as Eqn
from fewbit.tracing._jaxprs import Jaxpr as Jaxpr
from fewbit.tracing._jaxprs import bind as bind
from fewbit.tracing._jaxprs import forwards as forwards
from fewbit.tracing._jaxprs import scope_name as scope_name
from fewbit.tracing._jaxprs import unread as unread
from fewbit.tracing._jaxprs import varying_axes as varying_axes
from fewbit.tracing._origin import Changed as Changed
from fewbit.tracing._origin import Constant as Constant
from fewbit.tracing._origin import Origin as Origin
from fewbit.tracing._origin import TileDoesNotFit as TileDoesNotFit
from fewbit.tracing._origin import leaf_granularity as leaf_granularity
from fewbit.tracing._origin import leaf_roles as leaf_roles
from fewbit.tracing._sites import ArrayInfo as ArrayInfo
from fewbit.tracing._sites import Node as Node
from fewbit.tracing._sites import Program as Program
from fewbit.tracing._sites import Site as Site
from fewbit.tracing._sites import TracedSite as TracedSite
from fewbit.tracing._sites import analyse as analyse
from fewbit.tracing._sites import plain_size as plain_size
from fewbit.tracing._sites import product_letters as product_letters
