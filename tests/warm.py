"""The imports of a process from which others are forked, and what each of those would otherwise work out anew."""

import gc

gc.disable()  # nothing of an import is garbage, and looking for it takes a fifth of the time

import peft  # noqa: E402, F401
import pytest  # noqa: E402, F401
import transformers.models.llama.modeling_llama  # noqa: E402, F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

import tandem.engines.train.engine  # noqa: E402
import tandem.trainers.loop  # noqa: E402, F401

get_checkpoint_conversion_mapping("llama")  # makes that of all families, a thousand regular expressions, and keeps it
gc.enable()
