"""Tiny random media models as Hugging Face folders, with tokenizer and processor, made without a network."""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    CLIPImageProcessorPil,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipImageProcessorPil,
    WhisperFeatureExtractor,
)

from tandem.media import store
from tests.tiny import tiny_config, tiny_tokenizer

VOCAB_SIZE = 320
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES = ("idefics3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_audio")
"""``model_type`` of the tiny models."""


def tiny_media_model(tmp: Path, family: str, seed: int = 0) -> Path:
    """The tiny model of one of `FAMILIES`."""
    if family == "qwen2_audio":
        return tiny_qwen_audio(tmp, seed=seed)
    if family in ("idefics3", "llava"):
        return (tiny_idefics3 if family == "idefics3" else tiny_llava)(tmp, seed=seed)
    return tiny_qwen_vl(tmp, kind=family, seed=seed)


def picture(seed: int, width: int = 20, height: int = 16):
    """A random image in the media store."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return store.keep("image", pixels)


def sound(seed: int, seconds: float = 0.5):
    """Random noise in the media store."""
    samples = np.random.default_rng(seed).integers(-(2**15), 2**15, int(seconds * store.RATE), dtype=np.int16)
    return store.keep("audio", samples)


def media_tokenizer(*tokens: str, image: str = ""):
    """The tiny tokenizer with a template for parts, and these tokens more. ``image``: written for an image."""
    tokenizer = tiny_tokenizer(TEMPLATE.replace("IMAGE", image))
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
    tokenizer = media_tokenizer(
        "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", image="<image>"
    )
    text = tiny_config("llama", vocab_size=VOCAB_SIZE, tie_word_embeddings=tied)
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
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    images = Idefics3ImageProcessorPil(**sizes, do_image_splitting=splits)
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=tokenizer.chat_template).save_pretrained(folder)
    return folder


def tiny_llava(tmp: Path, *, seed: int = 0, tower: str = "clip", layer: int | list[int] = -2) -> Path:
    """Squares of 16 pixels with patches of 4: 16 placeholders a picture. ``layer``: whose states count, of 3."""
    folder = Path(tmp) / f"tiny-llava-{tower}-{seed}"
    tokenizer, clip = media_tokenizer("<image>", image="<image>"), tower == "clip"
    vision = {
        "model_type": f"{tower}_vision_model", "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    strategy = "default" if clip else "full"
    config = LlavaConfig(
        text_config=tiny_config("llama", vocab_size=VOCAB_SIZE, tie_word_embeddings=False).to_dict(),
        vision_config=vision | ({"projection_dim": 8} if clip else {}),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=layer,
        vision_feature_select_strategy=strategy,
    )
    with torch.random.fork_rng(devices=[]):
        model = _randomised(LlavaForConditionalGeneration(config), seed)
    model.save_pretrained(folder)
    square = {"height": 16, "width": 16}
    sizes = {"size": {"shortest_edge": 16}, "crop_size": square} if clip else {"size": square}
    LlavaProcessor(
        (CLIPImageProcessorPil if clip else SiglipImageProcessorPil)(**sizes),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=int(clip),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    return folder


def tiny_qwen_vl(tmp: Path, *, kind: str = "qwen2_5_vl", seed: int = 0, wide: bool = False) -> Path:
    """Patches of 4 pixels, merged 2 by 2; from 4 to 36 placeholders a picture. ``wide``: heads of 64."""
    folder = Path(tmp) / f"tiny-{kind}-{seed}"
    around = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    tokenizer = media_tokenizer(*around, image="".join(around))
    start, image, end = tokenizer.convert_tokens_to_ids(list(around))
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1} if wide else {}
    third = kind == "qwen3_vl"
    sizes |= {"num_hidden_layers": 3, "head_dim": 64 if wide else 8, "tie_word_embeddings": True} if third else {}
    text = tiny_config("qwen3" if third else "qwen2", vocab_size=VOCAB_SIZE, **sizes).to_dict()
    sections = [16, 8, 8] if wide else [2, 1, 1]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 24, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 24, "out_hidden_size": text["hidden_size"], "intermediate_size": 32}
    if third:
        vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [1, 0]}
    elif kind == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    config_class, model_class = {
        "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
        "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
        "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    }[kind]
    config = config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        vision_start_token_id=start,
        vision_end_token_id=end,
        video_token_id=VOCAB_SIZE - 1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        model = _randomised(model_class(config), seed)
    model.save_pretrained(folder)
    size = {"shortest_edge": 16 * 16, "longest_edge": 48 * 48}
    Qwen2VLImageProcessorPil(size=size, patch_size=4, merge_size=2, temporal_patch_size=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_qwen_audio(tmp: Path, *, text: str = "llama", seed: int = 0) -> Path:
    """It hears one second: 100 frames, up to 25 placeholders. ``text``: kind of its language model."""
    folder = Path(tmp) / f"tiny-qwen2_audio-{text}-{seed}"
    tokenizer = media_tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    audio = {
        "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8,
        "max_source_positions": 50,
    }  # fmt: skip
    config = Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **audio},
        text_config=tiny_config(text, vocab_size=VOCAB_SIZE, tie_word_embeddings=False).to_dict(),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    with torch.random.fork_rng(devices=[]):
        model = _randomised(Qwen2AudioForConditionalGeneration(config), seed)
    model.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template).save_pretrained(folder)
    return folder
