"""The two oracles, and how the ops are called in the tests.

1. The float64 reference: the documented formula, removed scores taken out by where(), gradients by autograd through it.
   An error may be twice that of PyTorch's math path in the same dtype, plus one rounding step.
2. The counting test: scores that are all equal and indicator inputs, so that out, dq, dk and dv each spell out which
   (query, key) pairs took part. The first oracle misses one lost key in a long row; this one cannot.

Everything here is 4-D: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), mask (B|1, Hq|1, Sq|1, Sk|1).
"""

import ctypes
import functools
import math
import mmap
import os
import secrets
import zlib
from dataclasses import dataclass, replace

import torch

import torch_flashsdpa
from reference_dropout import dropout_factor
from torch_flashsdpa._loader import binding

SEED = int(os.environ.get("FLASHSDPA_TEST_SEED") or secrets.randbits(31))
INF = float("inf")
FLOAT32_EPS = torch.finfo(torch.float32).eps


def generator(name):
    """A generator for the named case: fresh in every session, the same again under FLASHSDPA_TEST_SEED."""
    return torch.Generator().manual_seed(SEED ^ zlib.crc32(name.encode()))


@functools.cache
def ops():
    """torch.ops.flashsdpa, the compiled library loaded, and memory poisoned from here on."""
    binding()
    # glibc then fills every new block with 0xFF bytes: NaN in every float type, in torch's tensors and kernels' scratch.
    m_perturb = -6
    ctypes.CDLL(None).mallopt(m_perturb, 0x100)
    return torch.ops.flashsdpa


def virtual(elements, dtype):
    """A flat tensor in reserved memory: only the pages that are written exist, so offsets beyond 2^32 cost nothing."""
    size = elements * torch.empty(0, dtype=dtype).element_size()
    no_reserve = 0x4000  # MAP_NORESERVE on Linux
    return torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), dtype=dtype)


def bytes_allocated(function):
    """What torch's allocator handed out while function() ran, freed again or not."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    return sum(max(event.self_cpu_memory_usage, 0) for event in profile.events() if event.name != "[memory]")


@dataclass(frozen=True)
class Call:
    """The options of one call, named as the op's arguments; window is (left, right), -1 open."""

    is_causal: bool = False
    bottom_right: bool = False
    window: tuple = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0

    def op_arguments(self):
        left, right = self.window
        rare = {name: getattr(self, name) for name in ("softcap", "dropout_p") if getattr(self, name)}
        return dict(is_causal=self.is_causal, bottom_right=self.bottom_right, scale=self.scale,
                    window_left=left, window_right=right, **rare)

    def distance(self, seq_q, seq_k):
        """(seq_q, seq_k): of the key to the query's diagonal."""
        offset = seq_k - seq_q if self.bottom_right else 0
        return torch.arange(seq_k) - (torch.arange(seq_q)[:, None] + offset)

    def visible(self, seq_q, seq_k):
        """The (seq_q, seq_k) bool band of keys that a query may see before any mask."""
        distance = self.distance(seq_q, seq_k)
        left, right = self.window
        band = torch.ones(seq_q, seq_k, dtype=torch.bool)
        if left >= 0:
            band &= distance >= -left
        if right >= 0:
            band &= distance <= right
        if self.is_causal:
            band &= distance <= 0
        return band

    def scale_for(self, dim):
        if self.scale is not None:
            return self.scale
        return dim**-0.5 if dim else 1.0


@dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    mask_grad: bool = False
    planned: bool = False  # give the op the plan of the mask
    grad_out: torch.Tensor | None = None  # None: forward only
    grad_lse: torch.Tensor | None = None
    slopes: torch.Tensor | None = None  # (Hq,) or (B, Hq)
    sinks: torch.Tensor | None = None  # (Hq,); with a gradient, where there are gradients
    rng_state: torch.Tensor | None = None  # (2,): seed and offset of dropout

    def names(self):
        return (["dq", "dk", "dv"] + (["dmask"] if self.mask_grad else []) + (["dsinks"] if self.sinks is not None else []))

    def with_leaves(self, leaves):
        """(q, k, v, mask, sinks), with the leaves in place of what they stand for."""
        found = dict(zip(self.names(), leaves))
        return (*leaves[:3], found.get("dmask", self.mask), found.get("dsinks"))


@dataclass
class Result:
    out: torch.Tensor
    lse: torch.Tensor | None
    grads: dict
    weights: torch.Tensor | None = None  # (B, Hq, Sq, Sk) after the softmax, those of the sinks left out; of the reference alone


def keep_of(x, call):
    """(B|1, Hq|1, Sq, Sk) bool: the scores that take part. False and -inf remove; a NaN or a finite bias does not."""
    keep = call.visible(x.q.size(2), x.k.size(2))[None, None]
    if x.mask is None:
        return keep
    return keep & (x.mask if x.mask.dtype == torch.bool else x.mask != -INF)


def slope_bias(x, call):
    """(B|1, Hq, Sq, Sk) float64: what the slopes add to the scores; None without them."""
    if x.slopes is None:
        return None
    slopes = x.slopes.double().view(-1, x.q.size(1))
    return -slopes[..., None, None] * call.distance(x.q.size(2), x.k.size(2)).abs()


def dropped(x, call):
    """(B, Hq, Sq, Sk) float64: the factor of each weight, 0 or that of the kept ones; None without dropout."""
    if not call.dropout_p:
        return None
    return _dropout_factor(tuple(x.rng_state.tolist()), call.dropout_p, *x.q.shape[:3], x.k.size(2))


@functools.lru_cache(maxsize=1)
def _dropout_factor(state, *arguments):
    return dropout_factor(torch.tensor(state), *arguments)  # of one case it is asked for three times


def attention64(q, k, v, mask, keep, scale, softcap=0.0, slopes=None, sinks=None, factor=None):
    """(out, lse, weights) of the formula; differentiable. All of one dtype but a bool mask. slopes: as slope_bias() gives;
    factor: as dropped() gives. The weights returned are those before it."""
    group = q.size(1) // max(k.size(1), 1)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        scores = scores + slopes.to(scores.dtype)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    keep = keep.expand(scores.shape)
    if sinks is not None:  # a key more, without a value
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores, keep = torch.cat([scores, column], -1), torch.cat([keep, column != -INF], -1)
    empty = ~keep.any(-1, keepdim=True)  # rows without a key: a softmax over zeros, dropped after
    scores = torch.where(keep, scores, -INF).masked_fill(empty, 0.0)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)
    # Not scores.logsumexp(-1): its gradient is exp(score - lse), which loses log(n) where scores are near the lowest number.
    top = scores.detach().amax(-1, keepdim=True) if scores.size(-1) else scores.new_full((*scores.shape[:-1], 1), -INF)
    top = top.masked_fill(top == -INF, 0.0)
    lse = (top + (scores - top).exp().sum(-1, keepdim=True).log()).squeeze(-1).masked_fill(empty.squeeze(-1), -INF)
    weights = weights[..., : k.size(2)]
    return (weights if factor is None else weights * factor.to(weights.dtype)) @ v, lse, weights


def _leaves(x, cast=None):
    tensors = [x.q, x.k, x.v] + ([x.mask] if x.mask_grad else []) + ([x.sinks] if x.sinks is not None else [])
    return [(t.detach() if cast is None else t.detach().to(cast)).requires_grad_(x.grad_out is not None)
            for t in tensors]


def _differentiate(x, outputs, cotangents, leaves):
    if x.grad_out is None:
        return {}
    pairs = [(o, c) for o, c in zip(outputs, cotangents) if c is not None]
    grads = torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
    return dict(zip(x.names(), grads))


def reference(x, call):
    """The float64 result: out, lse and the gradients of grad_out and grad_lse."""
    leaves = _leaves(x, torch.float64)
    *inputs, mask, sinks = x.with_leaves(leaves)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    out, lse, weights = attention64(*inputs, mask, keep_of(x, call), call.scale_for(x.q.size(3)), call.softcap,
                                    slope_bias(x, call), sinks, dropped(x, call))
    cotangents = [c if c is None else c.double() for c in (x.grad_out, x.grad_lse)]
    return Result(out.detach(), lse.detach(), _differentiate(x, (out, lse), cotangents, leaves), weights.detach())


def math_path(x, call):
    """The yardstick: PyTorch's math path in the dtype of q, the float32 logsumexp for lse. What that path does not take is
    computed as it would: in float32, and rounded once.

    It lets a NaN of a removed key through, so it gets zeros instead; where NaN is due nothing is measured.
    """
    x = replace(x, **{n: torch.where(getattr(x, n).isfinite(), getattr(x, n), 0) for n in ("q", "k", "v")})
    if x.mask is not None and x.mask.is_floating_point():
        x = replace(x, mask=torch.where(x.mask.isnan(), 0, x.mask))
    leaves = _leaves(x)
    keep = keep_of(x, call)
    *_, mask, sinks = x.with_leaves(leaves)
    if mask is not None and mask.dtype != torch.bool:
        mask = torch.where(keep, mask, -INF)
    elif mask is not None or not keep.all():
        mask = keep
    scale = call.scale_for(x.q.size(3))
    lse_type = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    inputs = [t.to(lse_type) for t in leaves[:3]]
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.to(lse_type)
    slopes, factor = slope_bias(x, call), dropped(x, call)
    out, lse, _ = attention64(*inputs, wide_mask, keep, scale, call.softcap, slopes, sinks, factor)
    if not call.softcap and slopes is None and sinks is None and factor is None:
        out, _ = torch.ops.aten._scaled_dot_product_attention_math(*leaves[:3], mask, scale=scale,
                                                                     enable_gqa=x.q.size(1) != x.k.size(1))
    out = out.to(x.q.dtype)
    return Result(out.detach(), lse.detach(), _differentiate(x, (out, lse), (x.grad_out, x.grad_lse), leaves))


def largest_terms(x, call, want):
    """({output: terms}, {gradient: delta terms}): the largest sums of absolute terms behind each output.

    One rounding of the accumulator is relative to the terms where they cancel: a single key has dq = 0 as a difference
    of two dot products. The delta terms are the share of sum(grad_out * out), which the backward makes from out as stored.
    """
    group = x.q.size(1) // max(x.k.size(1), 1)
    q, k, v, weights = (t.detach().float().abs() for t in (x.q, x.k, x.v, want.weights))  # a magnitude needs no float64
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scale = abs(call.scale_for(x.q.size(3)))
    passed = 1.0  # by the cap, of a score's gradient
    if call.softcap:
        keys = x.k.detach().float().repeat_interleave(group, dim=1)
        passed = 1 - (scale * (x.q.detach().float() @ keys.transpose(-1, -2)) / call.softcap).tanh() ** 2
    keep = keep_of(x, call).expand(weights.shape)
    factor = 1.0 if call.dropout_p == 0 else dropped(x, call).float()
    terms, delta_terms = {"out": (weights * factor) @ v, "score": scale * (q @ k.transpose(-1, -2))[keep]}, {}
    if x.grad_out is not None:
        grad = x.grad_out.float().abs()
        delta = (grad * want.out.float().abs()).sum(-1, keepdim=True)
        slope = factor * (grad @ v.transpose(-1, -2)) + delta
        if x.grad_lse is not None:
            slope = slope + x.grad_lse.float().abs()[..., None]
        terms["dv"] = (weights * factor).transpose(-1, -2) @ grad
        for sums, score_grad in ((terms, weights * slope), (delta_terms, weights * delta)):
            sums["dq"] = scale * (passed * score_grad) @ k
            sums["dk"] = scale * (passed * score_grad).transpose(-1, -2) @ q
            sums["dmask"] = score_grad.sum_to_size(x.mask.shape) if x.mask_grad else score_grad
        if x.sinks is not None:
            weight = (x.sinks[:, None].double() - want.lse).exp().nan_to_num(0.0).float()  # no key, and a sink of -inf
            delta = delta.squeeze(-1)
            whole = delta if x.grad_lse is None else delta + x.grad_lse.float().abs()
            terms["dsinks"], delta_terms["dsinks"] = (weight * whole).sum((0, 2)), (weight * delta).sum((0, 2))
    return [{name: largest(t) for name, t in sums.items()} for sums in (terms, delta_terms)]


def run_op(x, call, forward=None):
    """Ours, through the op and its autograd; `forward`: the op, or what stands for it and may give None for lse."""
    forward = forward or ops().forward
    leaves = _leaves(x)
    *inputs, mask, sinks = x.with_leaves(leaves)
    plan = ops().mask_plan(x.mask) if x.planned else None
    out, lse = forward(*inputs, attn_mask=mask, mask_plan=plan, rng_state=x.rng_state, alibi_slopes=x.slopes, sinks=sinks,
                       **call.op_arguments())
    grads = _differentiate(x, (out, lse), (x.grad_out, x.grad_lse), leaves)
    return Result(out.detach(), lse if lse is None else lse.detach(), grads)


def run_sdpa(x, call):
    """Ours, through F.scaled_dot_product_attention in a strict scope."""
    ops()
    assert not call.bottom_right and call.window == (-1, -1) and x.grad_lse is None, "not expressible in SDPA"
    leaves = _leaves(x)
    mask = leaves[3] if x.mask_grad else x.mask
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves[:3], attn_mask=mask, is_causal=call.is_causal, scale=call.scale,
            enable_gqa=x.q.size(1) != x.k.size(1))
        grads = _differentiate(x, (out,), (x.grad_out,), leaves)
    return Result(out.detach(), None, grads)


# --- the comparison ---------------------------------------------------------------------------------------------------


def rounding_step(dtype, magnitude):
    """The distance of neighbouring numbers of dtype at this magnitude."""
    info = torch.finfo(dtype)
    magnitude = min(magnitude, info.max)
    if magnitude < info.tiny:
        return info.tiny * info.eps
    return info.eps * 2.0 ** math.floor(math.log2(magnitude))


def describe(name, got, want, error, bound):
    index = tuple(torch.unravel_index(error.argmax(), error.shape)) if error.numel() else ()
    index = tuple(int(i) for i in index)
    both = got.isfinite() & want.isfinite()
    cosine = torch.nn.functional.cosine_similarity(got[both], want[both], dim=0).item() if both.any() else float("nan")
    return (f"{name}: at {index} got {got[index].item():.9g}, want {want[index].item():.9g}, "
            f"error {error[index].item():.3g} > bound {bound:.3g}, cosine {cosine:.9f} (FLASHSDPA_TEST_SEED={SEED})")


def compare(name, got, want, bound):
    """got against the float64 want: the shape, equal inf and nan positions, and no error beyond bound."""
    assert got is not None, f"{name}: missing"
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    dtype, got = got.dtype, got.detach().double()
    rounded = want.to(dtype).double()  # a value beyond the range of dtype is inf in it
    odd = ~rounded.isfinite()
    same = torch.where(odd, (got == rounded) | (got.isnan() & rounded.isnan()), got.isfinite())
    if not same.all():
        raise AssertionError(f"{name}: {int((~same).sum())} values differ in inf/nan; " +
                             describe(name, got, want, (~same).double(), 0.0))
    error = torch.where(odd, 0.0, (got - want).abs())
    if error.numel() and error.max().item() > bound:
        raise AssertionError(describe(name, got, want, error, bound))


def largest(t):
    """The largest finite magnitude."""
    top = t.abs().max().item() if t.numel() else 0.0
    if math.isfinite(top):
        return top
    t = t[t.isfinite()]
    return t.abs().max().item() if t.numel() else 0.0


def bound_for(dtype, want, yardstick, terms, inherited=0.0):
    """Twice the yardstick's error, plus a rounding step of the output, plus one of the accumulator over the terms, plus
    what the output inherits from intermediate values as they are stored. dtype: of the output."""
    error = (yardstick.double() - want).abs()
    return 2 * largest(error) + rounding_step(dtype, largest(want)) + FLOAT32_EPS * terms + inherited


def check(x, call=Call(), run=run_op):
    """Runs the case and holds every output against the float64 reference. Returns our result."""
    dtype = x.q.dtype
    poison_memory(x.q) if x.q.is_cuda else poison_scratch(dtype)
    got, want = run(x, call), reference(x, call)
    yardstick, (terms, delta_terms) = math_path(x, call), largest_terms(x, call, want)
    # Relative errors of all weights: half a rounding step of a score, and for gradients of lse, from which the backward
    # makes them. The cap: where lse has no digits left for the logarithm of the sum, that is no excuse.
    score_error = FLOAT32_EPS / 2 * terms["score"]
    lse_error = min(rounding_step(torch.float32, largest(want.lse)) / 2, 2**-7)
    out_error = torch.finfo(dtype).eps / 2  # of out, from which the backward makes sum(grad_out * out)

    def hold(name, tensor, kind, want, yardstick, terms, inherited):
        assert tensor is not None and tensor.dtype == kind, f"{name} is {getattr(tensor, 'dtype', None)}, want {kind}"
        if kind == torch.float64:
            bound = 1e-12 * max(largest(want), terms)
        else:
            bound = bound_for(kind, want, yardstick, terms, inherited)
        compare(name, tensor, want, bound)

    hold("out", got.out, dtype, want.out, yardstick.out, terms["out"], score_error * terms["out"])
    if got.lse is not None:
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        hold("lse", got.lse, kind, want.lse, yardstick.lse, max(terms["score"], 1.0), 0.0)
    leaf_of = dict(dq=x.q, dk=x.k, dv=x.v, dmask=x.mask, dsinks=x.sinks)
    for name, grad in got.grads.items():
        inherited = (score_error + lse_error) * terms[name] + out_error * delta_terms.get(name, 0.0)
        hold(name, grad, leaf_of[name].dtype, want.grads[name], yardstick.grads[name], terms[name], inherited)
    check_exact_zeros(x, call, got)
    return got


def check_exact_zeros(x, call, got):
    """Rows without a key give exactly 0, and so do the gradients of rows and keys that take no part."""
    keep = keep_of(x, call).expand(x.q.size(0), x.q.size(1), -1, -1)
    blind = ~keep.any(-1)
    assert (got.out[blind] == 0).all(), "a row without a key is not exactly 0"
    if not got.grads:
        return
    assert (got.grads["dq"][blind] == 0).all(), "dq of a row without a key is not exactly 0"
    unseen = ~keep.any(2)  # (B, Hq, Sk)
    unseen = unseen.unflatten(1, (x.k.size(1), -1)).all(2) if x.k.size(1) else unseen
    for name in ("dk", "dv"):
        assert (got.grads[name][unseen] == 0).all(), f"{name} of a key that no query sees is not exactly 0"


@functools.cache
def _nan_inputs(dtype):
    return [torch.full((1, 2, 80, 256), float("nan"), dtype=dtype) for _ in range(3)]


def poison_scratch(dtype):
    """Leaves NaN in whatever scratch the kernels of dtype keep between calls."""
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in _nan_inputs(dtype))
        ops().forward(q, k, v)[0].sum().backward()


def poison_memory(like):
    """Leaves NaN in freed blocks of the device, of the sizes that outputs like `like` and their log-sum-exp will ask for."""
    blocks = [torch.full((like.numel() * n // 4 + 1,), float("nan"), device=like.device, dtype=torch.float32)
              for n in (1, 2, 4)]
    small = [torch.full((128,), float("nan"), device=like.device) for _ in range(8)]
    del blocks, small


# --- the counting test ------------------------------------------------------------------------------------------------


def _explain_difference(what, seen, keep):
    wrong = ((seen - keep.double()).abs() > 0.25) | ~seen.isfinite()
    if wrong.any():
        pairs = [tuple(p) for p in wrong.nonzero()[:5].tolist()]
        values = [round(seen[p].item(), 4) for p in pairs]
        raise AssertionError(f"{what}: {int(wrong.sum())} of {wrong.numel()} pairs wrong; first (b, h, query, key) "
                             f"{pairs}: weight {values}, want {[int(keep[p]) for p in pairs]}")


def _indicator(batch, heads, seq, dim, start, dtype):
    """(batch, heads, seq, dim): row start + i is the unit vector i, all other rows are 0."""
    t = torch.zeros(batch, heads, seq, dim, dtype=dtype)
    n = min(dim, seq - start)
    t[..., torch.arange(start, start + n), torch.arange(n)] = 1
    return t


def check_counting(batch, heads_q, heads_kv, seq_q, seq_k, dim, dtype, mask=None, call=Call(), backward=True,
                   planned=False, forward=None, mask_grad=True, sinks=False):
    """Every (query, key) pair of every head, one by one, through out and lse, and through dq, dk, dv and dmask.

    The mask must be bool, or hold only 0 and -inf. With all scores equal, a row of n keys has weights 1 / n. The
    gradient of lse alone makes the score gradient that very weight. `forward`: the op, or what stands for it; without
    backward it may give None for lse.
    sinks: with a sink of 0 for each head, which counts as a key more.
    """
    call = replace(call, scale=1.0)
    plan = ops().mask_plan(mask) if planned else None
    more = {"sinks": torch.zeros(heads_q)} if sinks else {}
    run = functools.partial(forward or ops().forward, attn_mask=mask, mask_plan=plan, **more, **call.op_arguments())
    group = heads_q // heads_kv
    dim_k = dim if backward else 8  # what the scores are made of is of no interest to the forward
    zeros_q, zeros_k = (torch.zeros(batch, h, s, dim_k, dtype=dtype) for h, s in ((heads_q, seq_q), (heads_kv, seq_k)))
    keep = keep_of(Inputs(zeros_q, zeros_k, zeros_k, mask), call).expand(batch, heads_q, seq_q, seq_k)
    n = keep.sum(-1, keepdim=True).double() + sinks  # (B, Hq, Sq, 1)
    head_weight = 1.0 + torch.arange(heads_kv, dtype=torch.float64)[:, None, None]  # tells the kv heads apart

    for start in range(0, seq_k, dim):
        stop = min(start + dim, seq_k)
        units = _indicator(batch, heads_kv, seq_k, dim, start, dtype)
        out, lse = run(zeros_q, zeros_k, (units * head_weight).to(dtype))
        seen = out[..., : stop - start].double() * n / head_weight.repeat_interleave(group, 0)
        _explain_difference(f"out, keys from {start}", seen, keep[..., start:stop])
        if backward:
            q, k = zeros_q.clone().requires_grad_(), units.requires_grad_()
            out, lse = run(q, k, zeros_k)
            (dq,) = torch.autograd.grad(lse, q, torch.ones_like(lse))
            _explain_difference(f"dq, keys from {start}", dq[..., : stop - start].double() * n, keep[..., start:stop])
    if seq_q and lse is not None:
        assert (lse - n.squeeze(-1).log()).nan_to_num(0.0).abs().max().item() < 1e-5, "lse is not log(n)"
    if backward:
        _count_columns(run, zeros_q, zeros_k, mask if mask_grad else None, keep, n, group)


def _count_columns(run, zeros_q, zeros_k, mask, keep, n, group):
    """dk, dv and dmask: the pairs as a key sees them. One query head of each group speaks at a time."""
    batch, heads_q, seq_q, dim = zeros_q.shape
    dtype = zeros_q.dtype
    for turn, start in enumerate(range(0, seq_q, dim)):
        stop = min(start + dim, seq_q)
        speaks = torch.arange(heads_q) % group == turn % group
        units = _indicator(batch, heads_q, seq_q, dim, start, dtype) * speaks[:, None, None]
        counts = n[:, speaks, start:stop, 0].unsqueeze(-2)  # (B, Hkv, 1, chunk)
        want = keep[:, speaks, start:stop].transpose(-1, -2)  # (B, Hkv, key, query)
        k, v = zeros_k.clone().requires_grad_(), zeros_k.clone().requires_grad_()
        out, lse = run(units, k, v)
        dk, dv = torch.autograd.grad([out, lse], [k, v], [units, torch.ones_like(lse)])
        for name, grad in (("dk", dk), ("dv", dv)):
            seen = grad[..., : stop - start].double() * counts
            _explain_difference(f"{name} (key, query), queries from {start}", seen, want)
    if mask is not None and mask.is_floating_point():
        leaf = mask.detach().requires_grad_()
        _, lse = run(zeros_q, zeros_k, zeros_k, attn_mask=leaf)
        weights = torch.where(keep, 1 / n, 0.0)
        (dmask,) = torch.autograd.grad(lse, leaf, torch.ones_like(lse))
        want = weights.sum_to_size(mask.shape)
        smallest = 1 / max(n.max().item(), 1.0)
        slack = 0.25 * smallest + torch.finfo(mask.dtype).eps * largest(want)
        compare("dmask", dmask, want, slack)
