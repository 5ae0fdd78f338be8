"""Bounds of accuracy that tests share, by name, with the reason for their size."""

# One rounding of a float type, relative.
F32_ULP = 2.0**-23
BF16_ULP = 2.0**-8

# XLA divides by a shared scale as a product with its reciprocal: two roundings instead of one.
F32_SCALE = 2 * F32_ULP
# Decoding in float32 against float64: the scale's rounding and the product's.
F32_DECODE = 4 * F32_ULP
# A code may differ from the float64 oracle's where the quotient is this close to a tie.
TIE = 1e-4

# The table of relative errors that pins the default numerics is given to this precision.
PINNED_ERROR = 5e-6

# Half a step, plus what the division and the product round.
HALF_STEP = 0.5 + 1e-3

# How much the search for the best clip must beat absmax on groups of 32 in int4 (squared error).
MSE_GAIN_INT4 = 0.93

# Stochastic rounding: mean of 4096 draws, in units of the grid's step.
STOCHASTIC_MEAN = 0.04

# An int8 model against its float twin, relative mean error: one to three products in a row.
NNX_INT8 = 0.03
# The same through a recurrence or a norm, which passes errors on.
NNX_RECURRENT = 0.06

# The same product in another library, against its largest result: the order of float32 sums and
# of the factors may differ.
PEER_F32 = 2e-6
# The peer rounds to bfloat16 between its steps, fewbit at the end.
PEER_BF16 = 4 * BF16_ULP
# A whole model with quantized activations: one code that falls on the other side of a tie.
PEER_MODEL_DYNAMIC = 1e-2
# A block of docs/from-qwix.md in the other library, of the largest result, as the page says it.
PEER_PAGE = 1e-5
# Two gradients of one small model with other noise in their rounding to int8.
NOISE = 0.05
# A Keras layer in another library, of the largest output: operands have the same codes, and
# float32 sums differ in their order. It is what that library's own tests allow.
PEER_KERAS = 1e-5
# Its scales: a quotient against a product with a reciprocal.
PEER_KERAS_SCALE = 2 * F32_SCALE
# Two ways to run one model with quantized activations: a difference in the last place of a sum may
# turn a code of the next layer's activations.
CODE_OF_NEXT_LAYER = 2e-2

# Native products of codes against XLA's, of the largest result: XLA fuses a scale with the sum that
# follows (one rounding instead of two), and in a training step that may turn an activation's code.
CODES_TILES = 1e-6
CODES_STEP = 1e-4

# An activation fused into a product, against float64: relative to the larger of its argument and
# its value (a sigmoid's is at most 1), where the argument is a float32.
FUSED_ACTIVATION = 4 * F32_ULP
# The same rounded to bfloat16 at the end, once; unfused, the sum and each step are rounded.
FUSED_BF16 = 4 * BF16_ULP

# Errors that a page prints, measured by a program that was compiled another way: a few codes turn.
PRINTED_ERROR = 1e-2

# A training product against float64, of the largest result: scales, sums and the scaled gradient in
# float32.
QT_FLOAT32 = 3e-6
# A product plus its adapter against float64, of the largest number: three float32 sums.
LORA_F32 = 3e-6
# The same in bfloat16, where the low-rank product is rounded between its two steps.
LORA_BF16 = 4 * BF16_ULP
# The same compiled as one program, mean error over mean magnitude: the largest value of every range
# lies on a tie, and the last bit of its scale decides.
CODES_AT_TIES = 2e-3
# Five training steps of adapters on eight devices against one: other orders of float32 sums.
LORA_SHARDED = 1e-3
# Loss of a small model after a few steps, nf4 base against float: the base's own rounding.
QLORA_LOSS = 0.15

# A native op on a mesh against one device, of the largest result: other orders of float32 sums.
MESH_F32 = 1e-5
