"""LoRA and QLoRA: adapters made, chosen for training, merged, saved and exchanged.

>>> import fewbit, jax, jax.numpy as jnp
>>> f = lambda params, x: x @ params['w']
>>> params, x = {'w': jnp.eye(4)}, jnp.ones((1, 4))
>>> plan = fewbit.plan(f, fewbit.LoraProvider(rank=2, alpha=4.0), params, x)
>>> params = init(plan, params, jax.random.key(0))
>>> sorted(adapters(params))
['w_lora_a', 'w_lora_b']
"""

from fewbit._plan_adapter import AdapterPlan as AdapterPlan
from fewbit.adapter_init import init as init
from fewbit.adapter_params import LoraParams as LoraParams
from fewbit.lora.merging import MergeReport as MergeReport
from fewbit.lora.merging import base_rules as base_rules
from fewbit.lora.merging import merge_lora as merge_lora
from fewbit.lora.peft_reading import load_adapters as load_adapters
from fewbit.lora.peft_writing import save_adapters as save_adapters
from fewbit.lora.selecting import adapters as adapters
from fewbit.lora.selecting import mask as mask
from fewbit.lora.selecting import split as split
from fewbit.lora.selecting import with_adapters as with_adapters
from fewbit.lora.selecting import without_adapters as without_adapters
