"""Encoder-decoders: T5 with learned relative position biases, whose gradient the training needs, and Whisper."""

import torch

from .case import Case, Model, real_tokens, transformers_model
from .decoders import targets

T5_CONFIG = {
    "full": {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
    "small": {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
}
T5_SHAPES = {"full": (16, 512, 128), "small": (3, 72, 24)}  # (batch, length of the encoder's text, of the decoder's)
WHISPER_CONFIG = {
    "full": {"vocab_size": 51865, "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
             "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "num_mel_bins": 80,
             "max_source_positions": 1500, "max_target_positions": 448},
    "small": {"vocab_size": 256, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 8,
              "max_source_positions": 75, "max_target_positions": 40},
}  # fmt: skip
WHISPER_BATCH = {"full": 16, "small": 2}


def make_t5(size):
    import transformers

    config = transformers.T5Config(**T5_CONFIG[size], dropout_rate=0.0, feed_forward_proj="gated-gelu", pad_token_id=0,
                                   decoder_start_token_id=0, use_cache=False)  # fmt: skip
    module, library = transformers_model(transformers.T5ForConditionalGeneration, config)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(".q.weight"):
                weight *= config.d_kv**-0.5  # T5 scales no scores; its queries are small instead
    return module, library


T5 = Model("t5-base", make_t5, ("T5Block",))


def t5_inputs(size):
    batch, source, target = T5_SHAPES[size]
    vocabulary = T5_CONFIG[size]["vocab_size"]
    labels = torch.randint(1, vocabulary, (batch, target))
    return {"input_ids": torch.randint(1, vocabulary, (batch, source)),
            "attention_mask": real_tokens(batch, source, "right").long(),
            "labels": targets(labels, real_tokens(batch, target, "right"))}  # fmt: skip


def make_whisper(size):
    import transformers

    config = transformers.WhisperConfig(**WHISPER_CONFIG[size], pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                        decoder_start_token_id=3, use_cache=False)  # fmt: skip
    return transformers_model(transformers.WhisperForConditionalGeneration, config)


WHISPER = Model("whisper-small", make_whisper, ("WhisperEncoderLayer", "WhisperDecoderLayer"))


def whisper_inputs(size):
    config, batch = WHISPER_CONFIG[size], WHISPER_BATCH[size]
    length = config["max_target_positions"]
    labels = torch.randint(4, config["vocab_size"], (batch, length))
    return {"input_features": torch.randn(batch, config["num_mel_bins"], 2 * config["max_source_positions"]),
            "labels": targets(labels, real_tokens(batch, length, "right"))}  # fmt: skip


def loss(module, **inputs):
    return module(**inputs).loss


CASES = [Case(T5, "train", t5_inputs, loss, train=True), Case(WHISPER, "train", whisper_inputs, loss, train=True)]
