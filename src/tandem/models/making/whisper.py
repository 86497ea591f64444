"""Reads the encoder of a Whisper model that was converted for CTranslate2."""

import re
import struct
from pathlib import Path
from typing import IO

import numpy as np
import torch

TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}

NAMES = {
    r"encoder/layer_(\d+)/ffn/linear_0": r"layers.\1.fc1",
    r"encoder/layer_(\d+)/ffn/linear_1": r"layers.\1.fc2",
    r"encoder/layer_(\d+)/ffn/layer_norm": r"layers.\1.final_layer_norm",
    r"encoder/layer_(\d+)/self_attention/layer_norm": r"layers.\1.self_attn_layer_norm",
    r"encoder/layer_(\d+)/self_attention/linear_1": r"layers.\1.self_attn.out_proj",
    r"encoder/(conv\d|layer_norm)": r"\1",
    "/gamma": ".weight",
    "/beta": ".bias",
    "/(weight|bias)": r".\1",
}
"""CTranslate2's parts of names → those of transformers."""


def read_encoder(file: Path) -> dict[str, torch.Tensor]:
    """The encoder's weights by the names of transformers, float32; ``embed_positions`` has all 1,500 positions."""
    weights = {}
    for name, value in read_variables(file).items():
        tensor = torch.from_numpy(value).float() if value.dtype == np.float16 else None
        if tensor is None or not name.startswith("encoder/"):
            continue
        if stacked := re.fullmatch(r"encoder/layer_(\d+)/self_attention/linear_0/(weight|bias)", name):
            for projection, part in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
                weights[f"layers.{stacked[1]}.self_attn.{projection}.{stacked[2]}"] = part
        elif name == "encoder/position_encodings/encodings":
            weights["embed_positions.weight"] = tensor
        else:
            for theirs, ours in NAMES.items():
                name = re.sub(theirs, ours, name)
            weights[name] = tensor
    # Whisper's keys have no bias: CTranslate2 stores zeros for it
    return {name: tensor for name, tensor in weights.items() if not name.endswith("k_proj.bias")}


def read_variables(file: Path) -> dict[str, np.ndarray]:
    """All variables of a CTranslate2 model: name, rank, sizes, type and bytes of each stand one behind the other."""
    with file.open("rb") as data:
        _version, _spec, _revision = _number(data, "I"), _text(data), _number(data, "I")
        variables = {}
        for _ in range(_number(data, "I")):
            name = _text(data)
            shape = [_number(data, "I") for _ in range(_number(data, "B"))]
            kind = TYPES[_number(data, "B")]
            variables[name] = np.frombuffer(bytearray(data.read(_number(data, "I"))), kind).reshape(shape)
        return variables


def _number(data: IO[bytes], kind: str) -> int:
    return int(struct.unpack(f"<{kind}", data.read(struct.calcsize(f"<{kind}")))[0])


def _text(data: IO[bytes]) -> str:
    return data.read(_number(data, "H")).rstrip(b"\0").decode()
