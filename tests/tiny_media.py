"""Tiny random media models as Hugging Face folders, with tokenizer and processor, made without a network."""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
)

from tandem.media import store
from tests.tiny import tiny_config, tiny_tokenizer

VOCAB_SIZE = 320
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def picture(seed: int, width: int = 20, height: int = 16):
    """A random image in the media store."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return store.keep("image", pixels)


def media_tokenizer(*tokens: str):
    """The tiny tokenizer with a template for parts, and these tokens more."""
    tokenizer = tiny_tokenizer(TEMPLATE)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    return tokenizer


def _randomised(model, seed: int):
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            scale = 0.2 if "text" in name or "language" in name or "lm_head" in name else 0.1
            parameter.normal_(0, scale)
            if parameter.dim() == 1 and "bias" not in name:
                parameter.add_(1)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model.eval()


def tiny_idefics3(tmp: Path, *, seed: int = 0, splits: bool = True, tied: bool = False) -> Path:
    """Tiles of 16 pixels with patches of 4, joined 2 by 2: 4 placeholders a tile; pictures get a longer edge of 32."""
    folder = Path(tmp) / f"tiny-idefics3-{seed}"
    tokenizer = media_tokenizer("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    text = tiny_config("llama", vocab_size=VOCAB_SIZE, tie_word_embeddings=tied)
    assert isinstance(text, LlamaConfig)
    vision = {
        "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text.to_dict(),
        vision_config=vision,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=tied,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        model = _randomised(Idefics3ForConditionalGeneration(config), seed)
    model.save_pretrained(folder)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}, do_image_splitting=splits)
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE).save_pretrained(folder)
    return folder
