"""A causal language model of Llama's kind, 1.2 billion parameters: training and prefill, padded and packed batches."""

from functools import partial

import torch

from .case import Case, Model, real_tokens, transformers_model

IGNORED = -100  # as a label: no part of the loss
CONFIG = {
    "full": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8,
             "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "small": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
# (batch, length) of what a step calls 2k and 8k.
SHAPES = {"full": {"2k": (4, 2048), "8k": (2, 8192), "8k-alone": (1, 8192)},
          "small": {"2k": (3, 72), "8k": (2, 136), "8k-alone": (1, 136)}}  # fmt: skip
SHORTEST_DOCUMENT = {"full": 128, "small": 10}


def make(size):
    import transformers

    config = transformers.LlamaConfig(**CONFIG[size], max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False)
    return transformers_model(transformers.LlamaForCausalLM, config)


LLAMA = Model("llama-1b", make, ("LlamaDecoderLayer",))


def targets(tokens, follows):
    """Labels for the tokens that are predicted from the one before: where `follows`, that is of the same document."""
    return tokens.masked_fill(~follows, IGNORED)


def batch(size, shape, padding=None):
    """Tokens of a batch, its padding mask, None without padding, and which tokens are no padding."""
    rows, length = SHAPES[size][shape]
    tokens = torch.randint(CONFIG[size]["vocab_size"], (rows, length))
    real = real_tokens(rows, length, padding)
    return tokens, None if padding is None else real.long(), real


def training_inputs(size, shape, padding=None):
    tokens, mask, real = batch(size, shape, padding)
    follows = torch.zeros_like(real)
    follows[:, 1:] = real[:, 1:] & real[:, :-1]
    return {"input_ids": tokens, "labels": targets(tokens, follows), "attention_mask": mask}


def packed_inputs(size, shape):
    """Documents of several lengths one behind the other: positions start anew, and transformers makes the mask of it."""
    tokens, _, _ = batch(size, shape)
    length, shortest = tokens.size(1), SHORTEST_DOCUMENT[size]
    starts = torch.zeros(length, dtype=torch.long)
    at = 0
    while at < length:
        starts[at:] = at
        at += int(torch.randint(shortest, 16 * shortest, ()))
    positions = (torch.arange(length) - starts).expand_as(tokens)
    return {"input_ids": tokens, "labels": targets(tokens, positions > 0), "position_ids": positions.contiguous()}


def prefill_inputs(size, shape, padding=None):
    tokens, mask, real = batch(size, shape, padding)
    last = (real * torch.arange(1, real.size(1) + 1)).argmax(1)
    return {"input_ids": tokens, "attention_mask": mask, "last": last}


def loss(module, **inputs):
    return module(**inputs).loss


def next_logits(module, last, **inputs):
    """(batch, vocabulary): logits of the token that follows each prompt."""
    hidden = module.model(**inputs).last_hidden_state
    return module.lm_head(hidden[torch.arange(hidden.size(0), device=hidden.device), last])


def training(step, shape, padding=None):
    return Case(LLAMA, step, partial(training_inputs, shape=shape, padding=padding), loss, train=True)


def prefill(step, shape, padding=None):
    return Case(LLAMA, step, partial(prefill_inputs, shape=shape, padding=padding), next_logits, train=False)


CASES = [
    training("train-2k", "2k"),
    training("train-2k-right-padded", "2k", "right"),
    training("train-2k-left-padded", "2k", "left"),
    training("train-8k", "8k-alone"),
    Case(LLAMA, "train-8k-packed", partial(packed_inputs, shape="8k-alone"), loss, train=True),
    prefill("prefill-2k", "2k"),
    prefill("prefill-2k-right-padded", "2k", "right"),
    prefill("prefill-2k-left-padded", "2k", "left"),
    prefill("prefill-8k", "8k"),
    prefill("prefill-8k-right-padded", "8k", "right"),
    prefill("prefill-8k-left-padded", "8k", "left"),
]
