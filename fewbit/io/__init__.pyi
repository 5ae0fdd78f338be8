from fewbit.io._errors import CheckpointError as CheckpointError
from fewbit.io._errors import cut as cut
from fewbit.io._errors import read_object as read_object
from fewbit.io._safetensors import SafetensorsFile as SafetensorsFile
from fewbit.io._safetensors import SafetensorsWriter as SafetensorsWriter
from fewbit.io._safetensors import dtype_name as dtype_name
from fewbit.io.checkpoint._inspect import inspect as inspect
from fewbit.io.checkpoint._inspect import verify as verify
from fewbit.io.checkpoint._load import load as load
from fewbit.io.checkpoint._save import CheckpointWriter as CheckpointWriter
from fewbit.io.checkpoint._save import save as save
from fewbit.io.foreign._prequantized import (
    process_prequantized_params as process_prequantized_params,
)
from fewbit.io.foreign._prequantized import restore_quantization_rules as restore_quantization_rules
from fewbit.io.foreign._read import read_checkpoint as read_checkpoint
from fewbit.io.stream._checkpoint import check_source as check_source
from fewbit.io.stream._checkpoint import quantize_checkpoint as quantize_checkpoint
