"""Makes a tiny random model that real servers take: ``python scripts/tiny_model.py FOLDER`` prints where it lies.

An untied Llama of 304 tokens, which servers fill up to 320 rows, with heads of 64, which vLLM's attention on a CPU can do.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.tiny import tiny_model_folder

SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}

if __name__ == "__main__":
    print(tiny_model_folder(Path(sys.argv[1]), **SIZES, max_position_embeddings=2048, initializer_range=0.1))
