"""Our kernels under a name of their own in transformers, for what its "sdpa" refuses: models with a soft cap or sinks.

Everything else needs no integration: what calls F.scaled_dot_product_attention (transformers' "sdpa", diffusers, timm) is
served once torch_flashsdpa.enable() has been called.
"""

import warnings

import torch
import torch.nn.functional as F

from ._attention import attention
from ._loader import binding
from .selection import sdpa_backend

# transformers reads meaning into these names: one that holds "flash" gets the inputs of the flash-attn package (packed
# sequences instead of masks), one that holds "sdpa" is refused for the models which need a soft cap or sinks.
ATTN_IMPLEMENTATION = "torch_fs"

OLDEST_TRANSFORMERS = "4.53"


def register_transformers():
    """Make attn_implementation="torch_fs" known to transformers; returns that name. A second call does nothing.

        name = torch_flashsdpa.integrations.register_transformers()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=name)

    A model that was loaded before: model.set_attn_implementation(name). ImportError: transformers is missing, or is older than
    its attention and mask interfaces; RuntimeError: the compiled binding is missing.
    """
    binding()
    try:
        import transformers
    except ImportError as error:
        text = f"transformers cannot be imported ({error}); install it, or call enable() for other callers"
        raise ImportError(text) from error
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise ImportError(
            f"transformers {transformers.__version__} lacks what attn_implementation={ATTN_IMPLEMENTATION!r} needs ({error}); "
            f'install {OLDEST_TRANSFORMERS} or newer, or call torch_flashsdpa.enable(), which serves its "sdpa" of any version'
        ) from error
    AttentionInterface.register(ATTN_IMPLEMENTATION, transformers_attention)
    AttentionMaskInterface.register(ATTN_IMPLEMENTATION, sdpa_mask)
    return ATTN_IMPLEMENTATION


def transformers_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    position_bias=None,
    softcap=None,
    s_aux=None,
    **kwargs,
):
    """One attention of a transformers model, in the form that its AttentionInterface asks for.

    Args:
        module: the attention layer; its is_causal (True where it has none) holds where the argument is None.
        query: (batch, heads, seq_q, dim); key, value: (batch, heads_kv, seq_k, dim), never expanded to query's heads.
        attention_mask: (batch, 1|heads, seq_q, seq_k), bool or additive, or None; it says all there is about causality and
            windows. Without it, more than one query is causal if is_causal says so, aligned top-left.
        position_bias: (1|batch, heads, seq_q, seq_k), added to the scaled scores, with a gradient.
        softcap, s_aux: softcap and sinks (heads,) of torch_flashsdpa.attention().
        dropout, scaling: dropout_p and scale of SDPA. Others are ignored, as "sdpa" ignores them.
    Returns:
        ((batch, seq_q, heads, dim), None): there are no attention weights to return.

    A call that our kernels do not take goes to stock PyTorch; one with a soft cap or sinks has no stock to go to, and raises a
    RuntimeError that names the reason.
    """
    if kwargs.get("output_attentions"):
        warnings.warn(f'{ATTN_IMPLEMENTATION} has no attention weights to return; use attn_implementation="eager" for them',
                      RuntimeWarning, stacklevel=2)  # fmt: skip
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # The sizes last: where nothing is causal, a compiled graph needs no guard on them.
    is_causal = bool(attention_mask is None and is_causal and query.shape[2] > 1)
    if position_bias is not None:
        attention_mask = _biased(position_bias, attention_mask, is_causal, query.shape[2], key.shape[2])
        is_causal = False
    arguments = {"attn_mask": attention_mask, "dropout_p": dropout, "is_causal": is_causal, "scale": scaling,
                 "enable_gqa": query.shape[1] != key.shape[1]}  # fmt: skip
    if softcap is None and s_aux is None:
        with sdpa_backend("flashsdpa"):
            out = F.scaled_dot_product_attention(query, key, value, **arguments)
    else:
        sinks = None if s_aux is None else s_aux.float()
        out = attention(query, key, value, **arguments, softcap=softcap or 0.0, sinks=sinks)
    return out.transpose(1, 2).contiguous(), None  # no copy where query lies as (batch, seq_q, heads, dim)


def _biased(bias, mask, is_causal, seq_q, seq_k):
    """The additive mask that is `bias` where `mask` (or causality) allows and -inf elsewhere."""
    if is_causal:
        mask = torch.ones(seq_q, seq_k, dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask
