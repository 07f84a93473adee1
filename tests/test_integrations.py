"""Models of other libraries on our kernels: transformers under a name of our own, callers of F.scaled_dot_product_attention.

Tiny models with random weights; each against the library's own "sdpa", or "eager" where "sdpa" refuses the model.
"""

import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F

import torch_flashsdpa
from torch_flashsdpa import integrations, record_dispatch

transformers = pytest.importorskip("transformers")

LENGTH, VOCABULARY, LAYERS, HEADS, HEADS_KV = 70, 64, 2, 4, 2
DECODER = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
           "num_attention_heads": HEADS, "num_key_value_heads": HEADS_KV, "max_position_embeddings": 256, "head_dim": 8,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip


def _decoder(name, **more):
    config = getattr(transformers, f"{name}Config")(**DECODER | more)
    return getattr(transformers, f"{name}ForCausalLM"), config


def _t5():
    return transformers.T5ForConditionalGeneration, transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=None)  # fmt: skip


def _whisper():
    return transformers.WhisperForConditionalGeneration, transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=LENGTH,
        max_target_positions=100, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip


def _bert():
    return transformers.BertForMaskedLM, transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=48,
        max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip


# Name -> (model and configuration, transformers' own implementation that serves it, attentions of one forward pass).
MODELS = {
    "llama": (lambda: _decoder("Llama"), "sdpa", LAYERS),
    "mistral, window 8": (lambda: _decoder("Mistral", sliding_window=8), "sdpa", LAYERS),
    "gemma2, soft cap": (lambda: _decoder("Gemma2", sliding_window=8, attn_logit_softcapping=2.0), "eager", LAYERS),
    "gpt-oss, sinks": (
        lambda: _decoder("GptOss", sliding_window=8, num_local_experts=2, num_experts_per_tok=1), "eager", LAYERS),
    "bert": (_bert, "sdpa", LAYERS),
    "t5, position bias": (_t5, "sdpa", 3 * LAYERS),
    "whisper": (_whisper, "sdpa", 3 * LAYERS),
}  # fmt: skip
GENERATING = [name for name in MODELS if name != "bert"]


@pytest.fixture(scope="module")
def ours():
    return integrations.register_transformers()


def make(name):
    """(model, reference implementation, attentions per forward pass), with weights that make attention matter."""
    build, reference, calls = MODELS[name]
    model_class, config = build()
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation=reference)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.5 if key.endswith(("q_proj.weight", "k_proj.weight", ".q.weight", ".k.weight")) else 0.2)
            elif key.endswith("sinks"):
                weight.normal_(std=2.0)
    return model.eval(), reference, calls


def inputs(name, padding=None):
    """(arguments of a forward pass, which positions are no padding)."""
    tokens = torch.randint(4, VOCABULARY, (2, LENGTH))
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 2 * LENGTH), "decoder_input_ids": tokens}, torch.ones(2, LENGTH, dtype=bool)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    if padding:
        real[1, slice(0, 30) if padding == "left" else slice(-30, None)] = False
    arguments = {"input_ids": tokens, "attention_mask": real.long()}
    if name.startswith("t5"):
        arguments |= {"decoder_input_ids": tokens, "decoder_attention_mask": real.long()}
    return arguments, real


def launches(recorder):
    return sum(row["count"] for row in recorder.rows if row["kind"] == "launch" and row["op"] == "flashsdpa::forward")


def sent_to_stock(recorder):
    return [row for row in recorder.rows if row["kind"] == "decision" and row["kernel"] == "stock"]


def logits_and_gradients(model, arguments, real):
    model.zero_grad()
    logits = model(**arguments).logits[real]
    logits.pow(2).mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_training(expected, got):
    torch.testing.assert_close(got[0], expected[0], rtol=1e-3, atol=1e-4)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item() + 1e-7, msg=name)


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_model_trains_as_with_its_own_attention(ours, name, padding):
    model, reference, calls = make(name)
    arguments, real = inputs(name, padding)
    expected = logits_and_gradients(model, arguments, real)
    model.set_attn_implementation(ours)
    assert model.config._attn_implementation == ours
    with record_dispatch() as recorder:
        got = logits_and_gradients(model, arguments, real)
    assert launches(recorder) == calls and not sent_to_stock(recorder), recorder.table()
    assert_equal_training(expected, got)


def test_the_special_terms_matter(ours):
    """Of the models above: without their cap, sinks, window or bias the logits are others, so equality says something."""
    for name, change in (
        ("gemma2, soft cap", lambda model: setattr(model.model.layers[0].self_attn, "attn_logit_softcapping", None)),
        ("gpt-oss, sinks", lambda model: model.model.layers[0].self_attn.sinks.data.fill_(-30.0)),
        ("mistral, window 8", lambda model: setattr(model.config, "sliding_window", None)),
        ("t5, position bias", lambda model: [w.data.zero_() for k, w in model.named_parameters() if "relative" in k]),
    ):
        model, *_ = make(name)
        model.set_attn_implementation(ours)
        arguments, _ = inputs(name)
        with torch.no_grad():
            before = model(**arguments).logits
            change(model)
            assert (model(**arguments).logits - before).abs().max() > 1e-2, name


@pytest.mark.parametrize("cache", [None, "static", "beams"])
@pytest.mark.parametrize("name", GENERATING)
def test_generate(ours, name, cache):
    model, reference, calls = make(name)
    arguments, _ = inputs(name, "left" if name != "t5, position bias" else "right")
    for extra in ("decoder_input_ids", "decoder_attention_mask"):
        arguments.pop(extra, None)
    steps = 6
    how = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    how |= {"num_beams": 2} if cache == "beams" else {"cache_implementation": cache} if cache else {}
    expected = model.generate(**arguments, **how)
    model.set_attn_implementation(ours)
    with record_dispatch() as recorder:
        got = model.generate(**arguments, **how)
    assert torch.equal(got, expected)
    assert launches(recorder) >= LAYERS * steps and not sent_to_stock(recorder), recorder.table()


def test_keys_are_not_expanded_and_masks_pass_as_they_are(ours):
    model, *_ = make("llama")
    model.set_attn_implementation(ours)
    arguments, _ = inputs("llama", "left")
    with record_dispatch() as recorder, torch.no_grad():
        model(**arguments)
        model(arguments["input_ids"])
    masked, causal = [row for row in recorder.rows if row["kind"] == "decision"]
    assert masked["shape_k"] == causal["shape_k"] == (2, HEADS_KV, LENGTH, 8) and masked["shape_q"][1] == HEADS
    assert masked["mask"] == f"(2, 1, {LENGTH}, {LENGTH}) bool" and not masked["is_causal"]
    assert not causal["mask"] and causal["is_causal"]


def test_compiled_in_one_graph_and_checkpointed(ours):
    model, *_ = make("llama")
    arguments, real = inputs("llama", "left")
    expected = logits_and_gradients(model, arguments, real)
    model.set_attn_implementation(ours)
    compiled = torch.compile(model.model, backend="aot_eager", fullgraph=True)
    with record_dispatch() as recorder, torch.no_grad():
        hidden = compiled(**arguments).last_hidden_state
    assert launches(recorder) == LAYERS
    torch.testing.assert_close(model.lm_head(hidden)[real], expected[0], rtol=1e-3, atol=1e-4)
    model.train()
    model.gradient_checkpointing_enable()
    with record_dispatch() as recorder:
        got = logits_and_gradients(model, arguments, real)
    assert launches(recorder) == 2 * LAYERS, "each forward runs again in the backward"
    assert_equal_training(expected, got)


QUERY, KEY = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
LAYER = types.SimpleNamespace(is_causal=True)


def test_causality_is_the_layers_unless_the_call_says_otherwise(ours):
    def attend(query=QUERY, mask=None, layer=LAYER, **how):
        out, weights = integrations.transformers_attention(layer, query, KEY, KEY, mask, **how)
        assert weights is None and out.is_contiguous()
        return out.transpose(1, 2)

    causal = F.scaled_dot_product_attention(QUERY, KEY, KEY, is_causal=True)
    full = F.scaled_dot_product_attention(QUERY, KEY, KEY)
    bidirectional = types.SimpleNamespace(is_causal=False)
    for got, expected in (
        (attend(), causal),
        (attend(layer=object()), causal),
        (attend(is_causal=False), full),
        (attend(layer=bidirectional), full),
        (attend(layer=bidirectional, is_causal=True), causal),
        (attend(mask=torch.ones(1, 1, 5, 7, dtype=torch.bool)), full),  # a mask says all
        (attend(QUERY[:, :, 4:]), full[:, :, 4:]),  # decoding: one query sees every key
        (attend(scaling=0.5), F.scaled_dot_product_attention(QUERY, KEY, KEY, is_causal=True, scale=0.5)),
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "additive"])
def test_position_bias_joins_the_mask(ours, mask):
    bias = torch.randn(1, 2, 5, 7, requires_grad=True)
    kept = torch.rand(1, 1, 5, 7) < 0.7
    kept[..., 0] = True
    additive = torch.randn(1, 1, 5, 7)
    given = {"bool": kept, "additive": additive}.get(mask)
    out, _ = integrations.transformers_attention(LAYER, QUERY, KEY, KEY, given, is_causal=mask == "causal", position_bias=bias)
    scores = QUERY @ KEY.mT * 8**-0.5 + bias
    if mask == "additive":
        scores = scores + additive
    elif mask:
        scores = scores.masked_fill(~(kept if mask == "bool" else torch.ones(5, 7, dtype=torch.bool).tril()), -torch.inf)
    expected = (scores.softmax(-1) @ KEY).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(result.pow(2).sum(), bias)[0] for result in (out, expected)]
    torch.testing.assert_close(*grads)


def test_what_we_refuse_goes_to_stock_where_there_is_one(ours):
    wide = KEY.repeat(1, 1, 1, 40)
    with record_dispatch() as recorder:
        integrations.transformers_attention(LAYER, QUERY, KEY, wide, None)
    (row,) = sent_to_stock(recorder)
    assert row["reasons"] == ["head_dim of value is 320; supported: 0 to 256"]
    with pytest.raises(RuntimeError, match="head_dim of value is 320"):
        integrations.transformers_attention(LAYER, QUERY, KEY, wide, None, softcap=2.0)


def test_dropout_of_a_model_in_training(ours):
    """With a soft cap too, which no stock has; the weights that are dropped follow torch's generator."""
    outs = []
    for softcap in (None, 2.0):
        for _ in range(2):
            torch.manual_seed(1)
            outs.append(integrations.transformers_attention(LAYER, QUERY, KEY, KEY, None, dropout=0.4, softcap=softcap)[0])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[2], outs[3]) and not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], integrations.transformers_attention(LAYER, QUERY, KEY, KEY, None)[0])


def test_attention_weights_are_not_promised(ours):
    with pytest.warns(RuntimeWarning, match="no attention weights to return"):
        integrations.transformers_attention(LAYER, QUERY, KEY, KEY, None, output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integrations.transformers_attention(LAYER, QUERY, KEY, KEY, None, output_attentions=False)


def test_registration_activates_nothing(run_python):
    code = "import torch_flashsdpa as t; t.integrations.register_transformers(); print(t.status()['router'], t.is_enabled())"
    assert run_python(code) == "False False"


def test_the_name_means_nothing_to_transformers():
    """The name "flashsdpa" would be loaded as a kernel of the flash-attn package; and refused where "sdpa" is."""
    from transformers.utils.generic import is_flash_attention_requested

    assert not is_flash_attention_requested(requested_attention_implementation=integrations.ATTN_IMPLEMENTATION)
    assert "sdpa" not in integrations.ATTN_IMPLEMENTATION


def test_a_transformers_without_the_interfaces_is_told_apart(monkeypatch):
    old = types.ModuleType("transformers.masking_utils")
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", old)
    said = rf"transformers {transformers.__version__} lacks .*install 4.53 or newer, or call .*enable"
    with pytest.raises(ImportError, match=said):
        integrations.register_transformers()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers cannot be imported"):
        integrations.register_transformers()


def test_sdpa_of_transformers_needs_no_registration():
    model, *_ = make("llama")
    arguments, real = inputs("llama", "left")
    expected = logits_and_gradients(model, arguments, real)
    torch_flashsdpa.enable("flashsdpa")
    with record_dispatch() as recorder:
        got = logits_and_gradients(model, arguments, real)
    assert launches(recorder) == LAYERS and not sent_to_stock(recorder)
    assert_equal_training(expected, got)


# --- others: they call F.scaled_dot_product_attention ---------------------------------------------------------------------


def serves_unchanged(model, *arguments):
    with torch.no_grad():
        expected = model(*arguments)
        torch_flashsdpa.enable("flashsdpa")
        with record_dispatch() as recorder:
            got = model(*arguments)
    assert launches(recorder) and not sent_to_stock(recorder)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    return launches(recorder)


def test_timm():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=5).eval()
    assert serves_unchanged(model, torch.randn(2, 3, 64, 64)) == 2


def test_diffusers():
    processor = pytest.importorskip("diffusers.models.attention_processor")
    model = processor.Attention(query_dim=64, heads=4, dim_head=16).eval()
    assert serves_unchanged(model, torch.randn(2, 100, 64)) == 1


class VisionBlock(torch.nn.Module):
    """A stand-in for both where they are not installed: one projection to q, k, v, read as strided views."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, dim))


def test_a_vision_block():
    assert serves_unchanged(torch.nn.Sequential(VisionBlock(), VisionBlock()), torch.randn(2, 100, 64)) == 2
