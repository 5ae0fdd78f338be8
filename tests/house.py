"""The house as a table: packages by rank, and what may still be otherwise than the laws want.

`test_house_laws.py` holds the library to it. `RANKS` and `BUDGETS` are the plan; `HOMES`, `UPHILL`
and `TWICE` are debts, which only shrink.
"""

# Lowest first; imports go to lower ranks only. Some are kept free for what comes.
RANKS = (
    *("_util", "numerics", "qarray", "rules", "presets", "kernels", "ops", "kv", "tracing"),
    *("planning", "interpreter", "providers", "odml", "calibration", "training", "adapters"),
    *("params", "models", "io", "keras", "lora", "lm", "as_qwix", "debug", "cli"),
)
# Above all packages: the library's own face, and the names that are not there.
FACE = ("__init__", "__main__", "_lazy", "_later", "contrib", "pallas")
# Below all: the version, as a constant.
GROUND = "_version"

# Where modules move that still stand elsewhere: `tools/move_house.py` does it, package by package.
HOMES = """
    _atomic _util/_atomic
    _documents _util/_documents
    _errors _util/_errors
    _files _util/_files
    _pattern_syntax _util/_pattern_syntax
    _patterns _util/_patterns
    _progress _util/_progress
    _settings _util/_settings
    _text _util/_text
    _versions _util/_versions
    numerics numerics/_codes
    _formats numerics/_formats
    packing numerics/_packing
    packing_numpy numerics/_packing_numpy
    _qarray_checks qarray/_checks
    _histograms qarray/_histograms
    _how qarray/_how
    _layout_moves qarray/_layout_moves
    _lookups qarray/_lookup
    _qarray_losses qarray/_losses
    _methods qarray/_methods
    moves qarray/_moves
    packing_panels qarray/_packing_panels
    _panel_moves qarray/_panel_moves
    _qarray_panels qarray/_panels
    qarray qarray/_quantize
    calibration qarray/_ranges
    _reshape qarray/_reshape
    _scales qarray/_scales
    _qarray_static qarray/_static
    tiling qarray/_tiles
    _qarray_type qarray/_type
    _qarray_atoms qarray/_views
    _rule_checks rules/_checks
    modes/qt_config rules/_qt_config
    _rule_qt rules/_qt_fields
    rules rules/_rules
    rules_io rules/_text
    training/configs rules/_training
    kernels/_cached_attention kernels/_attention
    kernels/_codes_dot kernels/_codes
    layouts kernels/_layouts
    kernels/_native kernels/_library
    storing kernels/_storing
    ops/argmax ops/_argmax
    ops/decision ops/_arithmetic
    ops/conv ops/_conv
    training/conv_products ops/_conv_qt
    ops/deferred ops/_deferred
    training/_run ops/_derivatives
    ops/dot_general ops/_dot
    training/dot_products ops/_dot_qt
    ops/einsum ops/_einsum
    training/einsum_products ops/_einsum_qt
    ops/granularity ops/_granularity
    ops/codes ops/_on_codes
    ops/panels ops/_on_panels
    training/paired ops/_paired
    ops/panel_conv ops/_panel_conv
    ops/ragged_dot ops/_ragged
    training/ragged_products ops/_ragged_qt
    training/reverse_only ops/_reverse_only
    ops/scaling ops/_scaling
    ops/sides ops/_sides
    straight ops/_straight
    ops/take ops/_take
    ops/top_k ops/_top_k
    jaxprs tracing/_jaxprs
    trace_layout tracing/_layout
    provenance tracing/_origin
    trace_shapes tracing/_shapes
    trace tracing/_sites
    _plan_adapter planning/_adapter
    adapter_params planning/_adapter_params
    adapter_trees planning/_adapter_trees
    beside planning/_beside
    static_scales planning/_companions
    decisions planning/_decide
    _plan_diff planning/_diff
    _plan_json planning/_json
    planner planning/_make
    _plan_messages planning/_messages
    _plan planning/_plan
    _plan_table planning/_table
    static_run interpreter/_beside
    call_keys interpreter/_call_keys
    calls interpreter/_calls
    rebuild interpreter/_control_flow
    current interpreter/_current
    fused_run interpreter/_fused_run
    fusing interpreter/_fusing
    interpret interpreter/_interpret
    models/planning interpreter/_planning
    engine interpreter/_runner
    sites interpreter/_site
    stored_checks interpreter/_stored_checks
    tapped_loops interpreter/_tapped_loops
    taps interpreter/_taps
    traced interpreter/_traced
    weight_moves interpreter/_weight_moves
    weight interpreter/_weights
    modes/__init__ providers/__init__
    modes/provider providers/_provider
    modes/ptq providers/_ptq
    _statistics calibration/_moving_average
    observer_tap calibration/_observer_tap
    observers calibration/_observers
    _observers_own calibration/_observers_own
    static_statistics calibration/_scales
    observed calibration/_statistics
    _observed_file calibration/_statistics_file
    tails calibration/_tails
    tiny_ranges calibration/_tiny_ranges
    training/delayed training/_delayed
    modes/qt_described training/_described
    training/drop_in training/_drop_in
    training/drop_in_delayed training/_drop_in_delayed
    training/histories training/_histories
    models/delayed training/_history_trees
    trained_inputs training/_inputs
    training/learned training/_learned
    learned_scales training/_learned_scales
    training/noise training/_noise
    modes/qt training/_provider
    trained training/_trained
    trained_histories training/_trained_histories
    trained_statistics training/_trained_statistics
    adapter_init adapters/_init
    adapter_products adapters/_products
    modes/lora adapters/_provider
    adapter_run adapters/_run
    adapters adapters/_shapes
    boxes params/_boxes
    params params/_quantize
    param_templates params/_template
    _trainable params/_trainable
    models/adapted models/_adapted
    models/argument_order models/_argument_order
    calibrating models/_calibrate
    _calibrating_messages models/_calibrate_messages
    models/converting models/_convert
    models/flax_serialization models/_flax_files
    models/flax_trees models/_flax_trees
    models/learning models/_learning
    models/pairs models/_pairs
    models/trained_runs models/_trained_runs
    models/linen_drop_in models/linen/_drop_in
    models/linen models/linen/_module
    models/linen_pairs models/linen/_pairs
    models/linen_class models/linen/_quantized
    models/nnx_adapters models/nnx/_adapters
    models/nnx_calls models/nnx/_calls
    models/nnx_drop_in models/nnx/_drop_in
    models/nnx_learned models/nnx/_learned
    models/nnx models/nnx/_model
    models/nnx_pairs models/nnx/_pairs
    models/nnx_places models/nnx/_places
    models/nnx_scopes models/nnx/_scopes
    models/nnx_structure models/nnx/_structure
    io/errors io/_errors
    io/orbax_source io/_orbax_source
    io/safetensors_file io/_safetensors
    keras/_serial_arrays io/_serial_arrays
    io/tensor_sources io/_sources
    io/stream_sources io/_stream_sources
    io/_folder io/checkpoint/_folder
    io/inspecting io/checkpoint/_inspect
    io/loading io/checkpoint/_load
    io/_manifest io/checkpoint/_manifest
    io/_plan_fits io/checkpoint/_plan_fits
    io/_read_leaf io/checkpoint/_read_leaf
    io/saving io/checkpoint/_save
    io/_tree io/checkpoint/_tree
    io/_tree_decoding io/checkpoint/_tree_decoding
    io/foreign_awq io/foreign/_awq
    io/foreign_compressed io/foreign/_compressed
    io/foreign_formats io/foreign/_formats
    io/foreign_fp8 io/foreign/_fp8
    io/foreign_gptq io/foreign/_gptq
    io/prequantized io/foreign/_prequantized
    io/prequantized_leaf io/foreign/_prequantized_leaf
    io/read_checkpoint io/foreign/_read
    io/restored_rules io/foreign/_restored_rules
    io/foreign_settings io/foreign/_settings
    io/foreign_kernels io/foreign/_weights
    io/foreign_words io/foreign/_words
    io/quantize_checkpoint io/stream/_checkpoint
    io/_leaf_stream io/stream/_leaf
    io/names io/stream/_names
    io/_partial io/stream/_partial
    io/_stream_plan io/stream/_plan
    io/_slices io/stream/_slices
    io/_stream_target io/stream/_target
    keras/_calibration keras/_calibrate
    keras/_cloning keras/_clone
    keras/_emulation keras/_emulate
    keras/_freed keras/_memory
    keras/qdq keras/compat/_qdq
    keras/utility keras/compat/utility
    keras/_config_base keras/config/_base
    keras/_choices keras/config/_choose
    keras/config keras/config/_configs
    keras/_config_files keras/config/_documents
    keras/_config_checks keras/config/_fields
    keras/_filters keras/config/_filters
    keras/_config_leaf keras/config/_leaf
    keras/_unheeded keras/config/_unheeded
    keras/_cached_attention keras/generate/_cache
    keras/_float_cache keras/generate/_float_cache
    keras/_generation keras/generate/_generation
    keras/kv_cache keras/generate/_kv_cache
    keras/_prompt_pieces keras/generate/_prompt
    keras/samplers keras/generate/_samplers
    keras/_attention keras/layers/_attention
    keras/_autocast keras/layers/_autocast
    keras/_examples keras/layers/_calls
    keras/_classes keras/layers/_classes
    keras/_losses keras/layers/_losses
    keras/_masks keras/layers/_masks
    keras/_model_calls keras/layers/_model_calls
    keras/_program keras/layers/_program
    keras/_scale_views keras/layers/_scale_views
    keras/_state keras/layers/_state
    keras/_variables keras/layers/_variables
    keras/_whole_models keras/layers/_whole_models
    keras/_checking keras/saving/_checking
    keras/_serial_classes keras/saving/_classes
    keras/_serial_config keras/saving/_config
    keras/_serial_format keras/saving/_format
    keras/_serial_holders keras/saving/_holders
    keras/_serial_hub keras/saving/_hub
    keras/_serial_layer keras/saving/_layer
    keras/_legacy_files keras/saving/_legacy
    keras/_proving keras/saving/_proving
    keras/_serial_restore keras/saving/_restore
    keras/_serial_store keras/saving/_store
    keras/_serial_tree keras/saving/_tree
    keras/_saving keras/saving/_whole
    keras/_converting keras/training/_convert
    keras/_lora keras/training/_lora
    keras/_qat keras/training/_qat
    keras/_remembered keras/training/_remembered
    keras/_training keras/training/_training
    lora/selecting lora/_choose
    lora/merging lora/_merge
    lora/peft_names lora/_peft_names
    lora/peft_reading lora/_peft_reading
    lora/peft_writing lora/_peft_writing
    reporting debug/_stored
    debug/_training_run debug/_training
    report_page/_charts debug/page/_charts
    report_page/_error_section debug/page/_error_section
    report_page/_facts debug/page/_facts
    report_page/__init__ debug/page/_html_report
    report_page/_markup debug/page/_markup
    report_page/_page debug/page/_page
    report_page/_plan_section debug/page/_plan_section
    report_page/_stats_section debug/page/_stats_section
    report_page/_tables debug/page/_tables
    report_page/_training_page debug/page/_training_page
    cli cli/__init__
    _cli_model cli/_arguments
    _commands cli/_commands
    _doctor cli/_doctor
    _later _absent
    contrib contrib/__init__
    pallas pallas/__init__
"""

# Imports to a higher rank: (package, package above it): the modules.
UPHILL = {
    ("qarray", "calibration"): "calibration -> _statistics",
    ("rules", "planning"): "modes/qt_config -> decisions",
    ("rules", "interpreter"): "modes/qt_config -> current",
    ("rules", "training"): "modes/qt_config -> training",
    ("ops", "training"): "training/_run -> training/delayed",
    ("tracing", "planning"): "trace -> _plan",
    ("planning", "interpreter"): """
        adapter_trees -> calls
        adapter_trees -> engine
        planner -> stored_checks
    """,
    ("planning", "adapters"): "planner -> adapters",
    ("planning", "params"): """
        adapter_trees -> boxes
        beside -> boxes
    """,
    ("interpreter", "training"): """
        engine -> learned_scales
        engine -> trained_histories
        engine -> trained_inputs
        engine -> trained_statistics
        engine -> training/learned
        models/planning -> trained_histories
        models/planning -> trained_inputs
        models/planning -> trained_statistics
        sites -> trained_histories
        sites -> trained_statistics
        sites -> training/delayed
    """,
    ("interpreter", "adapters"): """
        engine -> adapter_run
        engine -> adapters
        sites -> adapter_products
        sites -> adapter_run
    """,
    ("training", "params"): "learned_scales -> boxes",
    ("adapters", "params"): "adapter_init -> boxes",
    ("io", "keras"): "keras/_serial_arrays -> keras/_serial_format",
}

# Public functions and classes that share a name with another, and how often it is given.
TWICE = """
    CalibrationError:2 Decision:2 Difference:2 Leaf:2 Node:2 Prepared:2 Product:2 Remembered:2
    Stored:2 Target:2 Traced:2 adapters:3 add_scales:2 arithmetic:2 as_float:3 beside:2
    broadcast_in_dim:2 calibrate:2 check:4 check_backend:2 check_calibration:2 check_histories:2
    check_names:2 check_rules:2 check_scales:2 check_stored:2 concatenate:2 decibels:2 describe:7
    described:2 dynamic_slice:2 empty:3 expand_dims:2 float_runs:3 float_variables:2 fresh:2
    gather:2 getitem:2 index:2 inspect:2 is_nnx:2 is_quantized:2 kept:2 last_call:4 load:3
    load_model:2 map_leaves:2 measured:2 noise_key:2 pack:2 padded:2 pair:5 part_of:4 plan:6
    quantize:5 quantize_model:2 quantized_class:3 read:5 read_file:2 reference:2 register:2
    render:3 report:2 reshape:2 resolve:2 rounded:2 runs_natively:2 save:2 settle:2 slice_:2
    split:2 squeeze:2 summed_axes:2 sums:2 sync_folder:2 take_rows:2 to_ptq:2 trained:3
    transpose:2 unpack:3 value_of:2 verify:2 with_adapters:2
"""

# Lines that a package may have, in all its files.
BUDGETS = {
    **{"_util": 1620, "numerics": 670, "qarray": 3580, "rules": 1500, "kernels": 3020},
    **{"ops": 3790, "tracing": 1030, "planning": 2500, "interpreter": 2810, "providers": 670},
    **{"calibration": 1610, "training": 2240, "adapters": 820, "params": 630, "models": 4030},
    **{"io": 6630, "keras": 8320, "lora": 900, "debug": 3930, "cli": 600, "face": 440},
}
