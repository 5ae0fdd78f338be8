"""The house as a table: packages by rank, and what may still be otherwise than the laws want.

`test_house_laws.py` holds the library to it. `RANKS` and `BUDGETS` are the plan; `UPHILL`,
`ON_DEMAND` and `TWICE` are debts, which only shrink.
"""

# Lowest first; imports go to lower ranks only. Some are kept free for what comes.
RANKS = (
    *("_util", "numerics", "qarray", "rules", "presets", "kernels", "ops", "kv", "tracing"),
    *("planning", "interpreter", "providers", "odml", "calibration", "training", "adapters"),
    *("params", "models", "io", "as_neural_compressor", "keras", "lora", "lm", "as_qwix", "debug"),
    "cli",
)
# Above all packages: the library's own face, and the names that are not there.
FACE = ("__init__", "__main__", "_absent", "contrib", "observers", "pallas")
# Below all: the version, as a constant.
GROUND = "_version"

# Imports to a higher rank: (package, package above it): the modules. The interpreter still knows
# what training and adapters bring, until modes say it themselves.
UPHILL = {
    # A front end is loaded when its first model is seen; nothing else of `models` knows this one.
    ("models", "keras"): """
        models/_front_ends -> keras
    """,
    ("interpreter", "adapters"): """
        interpreter/_runner -> adapters/_run
        interpreter/_site -> adapters/_run
    """,
    ("interpreter", "training"): """
        interpreter/_runner -> training/_history_plans
        interpreter/_runner -> training/_inputs
        interpreter/_runner -> training/_learned
        interpreter/_site -> training/_delayed
        interpreter/_site -> training/_history_plans
        interpreter/_site -> training/_inputs
    """,
}

# Functions that import fewbit when they are called: a front end with the first model of its kind,
# and what few ever ask for.
ON_DEMAND = """
    __init__._elsewhere
    models/_front_ends.front_end
"""

# Public functions and classes that share a name with another, and how often it is given.
TWICE = """
    Decision:2 Difference:2 Leaf:2 Node:2 Prepared:2 Product:2 Remembered:2
    Stored:2 Traced:2 adapters:3 add_scales:2 arithmetic:2 beside:2
    broadcast_in_dim:2 calibrate:2 check:4 check_backend:2 check_calibration:2 check_histories:2
    check_names:2 check_rules:2 check_scales:2 check_stored:2 concatenate:2 decibels:2 describe:7
    described:2 dynamic_slice:2 empty:3 expand_dims:2 float_runs:3 float_variables:2 fresh:2
    gather:2 getitem:2 index:2 inspect:2 is_nnx:2 is_quantized:2 kept:2 last_call:3 load:2
    load_model:2 map_leaves:2 measured:2 noise_key:2 pack:2 padded:2 pair:5 part_of:4 plan:6
    quantize:5 quantize_model:2 quantized_class:3 read:5 read_file:2 reference:2 register:2
    render:2 report:2 reshape:2 resolve:2 rounded:2 runs_natively:2 save:2 settle:2 slice_:2
    split:2 squeeze:2 summed_axes:2 sums:2 take_rows:2 to_ptq:2 trained:3
    transpose:2 unpack:3 value_of:2 verify:2 with_adapters:2
"""

# Lines that a package may have, in all its files.
BUDGETS = {
    **{"_util": 2150, "numerics": 710, "qarray": 3945, "rules": 1610, "kernels": 3060},
    **{"ops": 4250, "tracing": 1180, "planning": 2850, "interpreter": 2830, "providers": 690},
    **{"calibration": 1610, "training": 2290, "adapters": 820, "params": 670, "models": 4470},
    **{
        "io": 6780,
        "as_neural_compressor": 150,
        "keras": 8960,
        "lora": 900,
        "as_qwix": 850,
        "debug": 3930,
        "cli": 600,
        "face": 440,
    },
}
