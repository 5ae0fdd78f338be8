"""A tokenizer for Gemma3 that needs no download: a token per byte, and every id has a text.

It is a real SentencePiece model (byte fallback), written directly instead of being trained, so it
may be as wide as the vocabulary of the model: a model with random weights picks any id, and each of
them has to turn into text again.
"""

import keras_hub

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")  # in Gemma3's own order
TURNS = ("<start_of_turn>", "<end_of_turn>")
IMAGES = ("<start_of_image>", "<end_of_image>", "<img>")
FIRST_BYTE = len(SPECIAL) + len(TURNS) + len(IMAGES)
SMALLEST = FIRST_BYTE + 256


def byte_model(vocabulary_size: int = SMALLEST) -> bytes:
    """A serialized SentencePiece model of exactly this many pieces."""
    from sentencepiece import sentencepiece_model_pb2 as model_format

    if vocabulary_size < SMALLEST:
        raise ValueError(f"a byte tokenizer has at least {SMALLEST} pieces, not {vocabulary_size}")
    kinds = model_format.ModelProto.SentencePiece
    model = model_format.ModelProto()

    def add(piece: str, kind: int) -> None:
        model.pieces.add(piece=piece, score=0.0, type=kind)

    for piece in SPECIAL:
        unknown = piece == "<unk>"
        add(piece, kinds.UNKNOWN if unknown else kinds.CONTROL)
    for piece in TURNS + IMAGES:  # written in prompts as they are
        add(piece, kinds.USER_DEFINED)
    for byte in range(256):
        add(f"<0x{byte:02X}>", kinds.BYTE)
    for number in range(vocabulary_size - SMALLEST):  # never made from text, but may be generated
        add(f"<unused{number}>", kinds.UNUSED)
    spec = model.trainer_spec
    spec.model_type = spec.BPE
    spec.byte_fallback = True
    spec.vocab_size = vocabulary_size
    for name, piece in {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"}.items():
        setattr(spec, f"{name}_id", SPECIAL.index(piece))
        setattr(spec, f"{name}_piece", piece)
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = False
    return model.SerializeToString()


def byte_tokenizer(vocabulary_size: int = SMALLEST) -> keras_hub.tokenizers.Gemma3Tokenizer:
    """A `Gemma3Tokenizer` over bytes."""
    return keras_hub.tokenizers.Gemma3Tokenizer(proto=byte_model(vocabulary_size))


def byte_preprocessor(
    vocabulary_size: int = SMALLEST, sequence_length: int = 64
) -> keras_hub.models.Gemma3CausalLMPreprocessor:
    """The preprocessor of a text-only `Gemma3CausalLM`, over bytes."""
    return keras_hub.models.Gemma3CausalLMPreprocessor(
        byte_tokenizer(vocabulary_size), image_converter=None, sequence_length=sequence_length
    )
