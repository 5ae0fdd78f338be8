"""How a Keras model shall be quantized: the configs, under the names people know.

    config = StaticQuantConfig(weight_dtype="int8") + DynamicQuantConfig(
        weight_dtype="int4", group_size=32, white_list=["decoder/.*"]
    )

Where several configs of a sum select a layer, the last one decides. `white_list` selects layers,
`exclude_list` takes some out again, and `set_local` gives some a config of their own.
"""
