"""The parts that both models share: SmolLM2 with tokens for media, their chat template, and the folder they are saved in."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tandem.api.weight_files import save_tensors
from tandem.models.making.learning import LearnedTokens

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if 'KIND' in part['type'] %}MARKER"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's, without the system message that it adds by itself, and with parts."""


def chat_tokenizer(base: Path, tokens: list[str], kind: str, marker: str) -> PreTrainedTokenizerBase:
    """The tokenizer in ``base`` with further special tokens and a template that writes ``marker`` for parts of a kind."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = CHAT.replace("KIND", kind).replace("MARKER", marker)
    return tokenizer


def frozen_text_model(base: Path, size: int, dtype: torch.dtype) -> PreTrainedModel:
    """The language model in ``base``, frozen, with ``size`` embeddings: each new one is the mean of the others."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    old = model.config.vocab_size
    model.resize_token_embeddings(size, mean_resizing=False)
    weight = model.get_input_embeddings().weight.data
    weight[old:] = weight[:old].float().mean(0).to(dtype)
    model.config._name_or_path = ""
    return model.requires_grad_(False).eval()


def question_tokens(
    tokenizer: PreTrainedTokenizerBase, kind: str, marker: str, expansion: str, text: str
) -> tuple[int, ...]:
    """Tokens of the chat that shows one medium and asks ``text``, up to where the answer begins."""
    message = {"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}
    chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(chat.replace(marker, expansion), add_special_tokens=False)["input_ids"])


def keep_new_tokens(model: PreTrainedModel, new: LearnedTokens) -> None:
    """Puts the learned embeddings into the model that is saved."""
    with torch.no_grad():
        model.get_input_embeddings().weight[new.first :] = new.weight


def write_folder(folder: Path, model: PreTrainedModel, processor: ProcessorMixin) -> None:
    """Saves weights in bfloat16, configuration, tokenizer and processor as transformers reads them."""
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    weights = model.state_dict()
    if getattr(model.config, "tie_word_embeddings", False):
        del weights["lm_head.weight"]  # the embeddings, a second time
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_tensors(weights, folder / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder)
    text = model.config.get_text_config()
    stops = GenerationConfig(bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    stops.save_pretrained(folder)
    processor.save_pretrained(folder)
