"""Tiny random models with a tokenizer, as Hugging Face folders made without a network."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

KINDS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "smollm", "smollm3")
VOCAB_SIZE = 304
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "What is the sum of the two numbers? Answer with just the number.",
    "There are three trees and she has four apples, so the answer is seven.",
    "user assistant system question therefore total each how many",
)


def tiny_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE over about 300 tokens, digits split, ChatML: any text can be encoded and decoded back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    return fast


def tiny_config(kind: str = "llama", **overrides):
    """The configuration of one architecture, small enough for a test.

    Sliding windows are 8 tokens, so that short test sequences leave them; Gemma 2 has both logit soft-caps.
    """
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    kinds = {
        "llama": (LlamaConfig, {}),
        "smollm": (
            LlamaConfig,
            {
                "tie_word_embeddings": True,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "hidden_size": 48,
                "head_dim": 16,
            },
        ),
        "mistral": (MistralConfig, {"sliding_window": 8}),
        "qwen2": (Qwen2Config, {"tie_word_embeddings": True, "hidden_size": 32, "head_dim": None}),
        "qwen3": (Qwen3Config, {"head_dim": 16}),
        "smollm3": (
            SmolLM3Config,
            {"tie_word_embeddings": True, "no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "head_dim": None},
        ),
        "gemma2": (
            Gemma2Config,
            {
                "tie_word_embeddings": True,
                "num_hidden_layers": 3,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 5.0,
                "query_pre_attn_scalar": 12,
                **windows,
            },
        ),
        "gemma3": (
            Gemma3TextConfig,
            {
                "tie_word_embeddings": True,
                "num_hidden_layers": 3,
                "num_key_value_heads": 1,
                "query_pre_attn_scalar": 12,
                **windows,
            },
        ),
    }
    config_class, own = kinds[kind]
    settings = {name: value for name, value in {**common, **own, **overrides}.items() if value is not None}
    return config_class(**settings)


def tiny_model(kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> torch.nn.Module:
    """A random Hugging Face model; norms and biases are random too, so that leaving one out shows.

    The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **overrides), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter)) if "bias" not in name else parameter.normal_(0, 0.2)
    return model.to(dtype).eval()


def tiny_model_folder(
    tmp: Path, kind: str = "llama", *, seed: int = 0, chat_template: str | None = CHATML, tokenizer: bool = True, **overrides
) -> Path:
    """A complete model folder under ``tmp``: weights (float32), config, generation config, tokenizer with ChatML template.

    ``kind``: one of `KINDS`. ``overrides`` go to the model's configuration. Calling it twice gives the same folder.
    """
    folder = Path(tmp) / f"tiny-{kind}-{seed}"
    model = tiny_model(kind, seed=seed, **overrides)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder
