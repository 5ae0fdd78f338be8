"""LoRA and QLoRA: adapters made, chosen for training, merged, saved and exchanged.

>>> import fewbit, jax, jax.numpy as jnp
>>> f = lambda params, x: x @ params['w']
>>> params, x = {'w': jnp.eye(4)}, jnp.ones((1, 4))
>>> plan = fewbit.plan(f, fewbit.LoraProvider(rank=2, alpha=4.0), params, x)
>>> params = init(plan, params, jax.random.key(0))
>>> sorted(adapters(params))
['w_lora_a', 'w_lora_b']
"""

from fewbit.adapters import init as init
from fewbit.lora._merge import MergeReport as MergeReport
from fewbit.lora._merge import adapters as adapters
from fewbit.lora._merge import base_rules as base_rules
from fewbit.lora._merge import mask as mask
from fewbit.lora._merge import merge_lora as merge_lora
from fewbit.lora._merge import split as split
from fewbit.lora._merge import with_adapters as with_adapters
from fewbit.lora._merge import without_adapters as without_adapters
from fewbit.lora._peft import load_adapters as load_adapters
from fewbit.lora._peft import save_adapters as save_adapters
from fewbit.planning import AdapterPlan as AdapterPlan
from fewbit.planning import LoraParams as LoraParams
