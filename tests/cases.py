"""Named cases: what the two oracles are run on. Recipes for masks and memory layouts, lists. (matrix.py has the
pairs of all options.)

A mask is written "kind", "kind:axes" or "kind:axes:strides". `axes` holds the letters of the axes of full size out of
b, h, q, k (default bhqk); the others have size 1. `strides` is one of MASK_STRIDES (default dense).
"""

import itertools
from dataclasses import dataclass, field, replace

import torch
from oracle import INF, Call, Inputs, generator

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TILE = 64  # the granule of the mask plan; tiles are multiples of it


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


# --- masks ------------------------------------------------------------------------------------------------------------
# Each recipe takes (generator, (batch, heads, seq_q, seq_k), dtype), some of the four sizes being 1.


def _positions(shape):
    return torch.arange(shape[2])[:, None], torch.arange(shape[3])


def _random(g, shape, dtype):
    return torch.rand(shape, generator=g) < 0.5


def _causal(g, shape, dtype):
    rows, cols = _positions(shape)
    return (cols <= rows).expand(shape).clone()


def _padding(g, shape, dtype):
    lengths = torch.randint(1, max(shape[3], 1) + 1, (*shape[:2], 1, 1), generator=g)
    return (torch.arange(shape[3]) < lengths).expand(shape).clone()


def _padding_left(g, shape, dtype):
    pads = torch.randint(0, max(shape[3], 1), (*shape[:2], 1, 1), generator=g)
    return (torch.arange(shape[3]) >= pads).expand(shape).clone()


def _prefix_lm(g, shape, dtype):
    rows, cols = _positions(shape)
    prefixes = torch.randint(0, shape[3] + 1, (*shape[:2], 1, 1), generator=g)
    return ((cols <= rows) | (cols < prefixes)).expand(shape).clone()


def _checkerboard(g, shape, dtype):
    rows, cols = _positions(shape)
    return ((rows + cols) % 2 == 0).expand(shape).clone()


def _window(g, shape, dtype):
    rows, cols = _positions(shape)
    return ((cols - rows).abs() <= 20).expand(shape).clone()


def _document(g, shape, dtype):
    ends = torch.randint(1, max(shape[3], 2), (4,), generator=g).sort().values
    rows, cols = (torch.bucketize(p, ends) for p in _positions(shape))
    return (rows == cols).expand(shape).clone()


def _rows_false(g, shape, dtype):
    mask = torch.rand(shape, generator=g) < 0.7
    mask &= torch.rand(*shape[:3], 1, generator=g) < 0.6
    return mask


def _granules(g, shape, dtype):
    """Whole granules empty or full, beside mixed ones, with edges on and one off the 64 grid."""
    rows, cols = (p // TILE for p in _positions(shape))
    kind = (rows * 3 + cols) % 4
    mask = torch.where(kind < 2, kind == 1, torch.rand(shape, generator=g) < 0.3)
    mask[..., TILE : TILE + 1, :] = False
    return mask


def _one_key(g, shape, dtype):
    mask = torch.zeros(shape, dtype=torch.bool)
    pick = torch.randint(0, max(shape[3], 1), (*shape[:3], 1), generator=g)
    return mask.scatter_(3, pick, True) if shape[3] else mask


def _single_true(g, shape, dtype):
    """One score in each head: nearly every row is without a key."""
    mask = torch.zeros(*shape[:2], shape[2] * shape[3], dtype=torch.bool)
    pick = torch.randint(0, max(mask.size(2), 1), (*shape[:2], 1), generator=g)
    return (mask.scatter_(2, pick, True) if mask.size(2) else mask).view(shape)


def _alibi(g, shape, dtype):
    rows, cols = _positions(shape)
    slopes = 2.0 ** (-8 * torch.arange(1, shape[1] + 1) / shape[1])
    return (-slopes[:, None, None] * (rows - cols).abs()).expand(shape).to(dtype).clone()


def _bias(g, shape, dtype):
    return torch.randn(shape, generator=g).to(dtype)


def _bias32(g, shape, dtype):
    return torch.randn(shape, generator=g)


def _bias_inf(g, shape, dtype):
    return _bias(g, shape, dtype).masked_fill_(~_rows_false(g, shape, dtype), -INF)


def _lowest(g, shape, dtype):
    """The lowest finite number where another library would write -inf; some rows hold nothing else."""
    mask = torch.zeros(shape, dtype=dtype)
    return mask.masked_fill_(~_rows_false(g, shape, dtype), torch.finfo(dtype).min)


MASK_KINDS = {
    "random": _random,
    "causal": _causal,
    "padding": _padding,
    "padding_left": _padding_left,
    "prefix_lm": _prefix_lm,
    "checkerboard": _checkerboard,
    "window": _window,
    "document": _document,
    "rows_false": _rows_false,
    "granules": _granules,
    "one_key": _one_key,
    "single_true": _single_true,
    "all_true": lambda g, shape, dtype: torch.ones(shape, dtype=torch.bool),
    "all_false": lambda g, shape, dtype: torch.zeros(shape, dtype=torch.bool),
    "zeros": lambda g, shape, dtype: torch.zeros(shape, dtype=dtype),
    "negative_zeros": lambda g, shape, dtype: -torch.zeros(shape, dtype=dtype),
    "bias": _bias,
    "bias32": _bias32,
    "bias_inf": _bias_inf,
    "alibi": _alibi,
    "lowest": _lowest,
    "all_inf": lambda g, shape, dtype: torch.full(shape, -INF, dtype=dtype),
}


def _poison(dtype):
    return True if dtype == torch.bool else float("nan")


def _inside(mask, big_shape, window):
    """The mask's values in a window of a bigger poisoned tensor."""
    big = torch.full(big_shape, _poison(mask.dtype), dtype=mask.dtype)
    view = big[window]
    view.copy_(mask)
    return view


MASK_STRIDES = {
    "dense": lambda m: m,
    "transposed": lambda m: m.transpose(2, 3).contiguous().transpose(2, 3),
    "heads_last": lambda m: m.movedim(1, 3).contiguous().movedim(3, 1),
    "rows": lambda m: _inside(m, (*m.shape[:2], 2 * m.shape[2], m.shape[3]), (..., slice(None, None, 2), slice(None))),
    "cols": lambda m: _inside(m, (*m.shape[:3], 2 * m.shape[3]), (..., slice(None, None, 2))),
    "corner": lambda m: _inside(m, (*m.shape[:2], m.shape[2] + 3, m.shape[3] + 5), (..., slice(3, None), slice(5, None))),
}
BROADCASTS = ["".join(axes) for n in range(5) for axes in itertools.combinations("bhqk", n)]  # all 16


def make_mask(recipe, name, sizes, dtype):
    """The mask of a recipe. `expanded` as strides gives the full shape with stride 0 on the axes not named."""
    kind, axes, strides = (recipe.split(":") + ["", ""])[:3]
    axes = axes or "bhqk"
    shape = tuple(size if letter in axes else 1 for letter, size in zip("bhqk", sizes))
    if axes == "-":
        shape = (1, 1, 1, 1)
    mask = MASK_KINDS[kind](generator(name + recipe), shape, dtype)
    if strides == "expanded":
        return mask.expand(sizes)
    return MASK_STRIDES[strides or "dense"](mask)


def placed(t, device):
    """The same view of a copy of its whole storage on the device: strides and offset kept."""
    storage = t.new_empty(0, device="cpu").set_(t.untyped_storage())
    return storage.to(device).as_strided(t.size(), t.stride(), t.storage_offset())


# --- memory layouts of (B, H, S, D) ------------------------------------------------------------------------------------


def _permuted(order):
    axes = ["bhs".index(letter) for letter in order] + [3]
    inverse = [axes.index(i) for i in range(4)]
    return lambda t: t.permute(axes).contiguous().permute(inverse)


def _padded_rows(t):
    """A chunk of packed rows (B, S, H, 3 D + 1), the neighbours being NaN: also misaligned."""
    batch, heads, seq, dim = t.shape
    packed = torch.full((batch, seq, heads, 3 * dim + 1), float("nan"), dtype=t.dtype)
    view = packed[..., dim : 2 * dim].transpose(1, 2)
    view.copy_(t)
    return view


def _offset(t):
    flat = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype)
    view = flat[1:].view(t.shape)
    view.copy_(t)
    return view


PERMUTATIONS = ["".join(p) for p in itertools.permutations("bhs")]
LAYOUTS = {order: _permuted(order) for order in PERMUTATIONS} | {
    "packed": _padded_rows,
    "offset": _offset,
    "every_second_row": lambda t: _inside(t, (*t.shape[:2], 2 * t.shape[2], t.shape[3]), (..., slice(None, None, 2), slice(None))),
    "last_stride_2": lambda t: _inside(t, (*t.shape[:3], 2 * t.shape[3]), (..., slice(None, None, 2))),
    "columns": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "expand_batch": lambda t: t[:1].expand(t.shape),
    "expand_heads": lambda t: t[:, :1].expand(t.shape),
    "expand_seq": lambda t: t[:, :, :1].expand(t.shape),
    "expand_last": lambda t: t[..., :1].expand(t.shape),
    "expand_all": lambda t: t.flatten()[:1].view(1, 1, 1, 1).expand(t.shape) if t.numel() else t,
}
GRAD_LAYOUTS = {
    "dense": lambda t: t,
    "sum": lambda t: torch.ones((), dtype=t.dtype).expand(t.shape),  # what out.sum().backward() gives
    "transposed": _permuted("bsh"),
    "sliced": LAYOUTS["packed"],
    "last_stride_2": LAYOUTS["last_stride_2"],
    "columns": LAYOUTS["columns"],
    "expand_seq": LAYOUTS["expand_seq"],
}


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    batch: int = 1
    heads: tuple = (2, 2)  # query heads, kv heads
    seq: tuple = (65, 65)  # queries, keys
    dim: tuple = (32, 32)  # of q and k, of v
    dtype: torch.dtype = torch.float32
    mask: str = ""
    mask_grad: bool = False
    planned: bool = False
    call: Call = field(default_factory=Call)
    layout: tuple = ("bhs", "bhs", "bhs")  # of q, k, v
    grad: str = "dense"  # layout of grad_out; "" forward only
    lse_grad: bool = False
    slopes: str = ""  # "h" or "bh"
    sinks: bool = False

    def __str__(self):
        return f"{self.name}-{dtype_name(self.dtype)}"


def inputs(case, device="cpu"):
    """The tensors of a case, normal random; the seed depends on the case and the session. Masks are made on the CPU only."""
    g = generator(str(case))
    (heads_q, heads_kv), (seq_q, seq_k), (dim, dim_v) = case.heads, case.seq, case.dim

    def normal(*shape):
        return torch.randn(shape, generator=g, device="cpu").to(device, case.dtype)

    with torch.device(device):
        q = LAYOUTS[case.layout[0]](normal(case.batch, heads_q, seq_q, dim))
        k = LAYOUTS[case.layout[1]](normal(case.batch, heads_kv, seq_k, dim))
        v = LAYOUTS[case.layout[2]](normal(case.batch, heads_kv, seq_k, dim_v))
    mask = make_mask(case.mask, str(case), (case.batch, heads_q, seq_q, seq_k), case.dtype) if case.mask else None
    grad_out = GRAD_LAYOUTS[case.grad](normal(case.batch, heads_q, seq_q, dim_v)) if case.grad else None
    grad_lse = torch.randn(case.batch, heads_q, seq_q, generator=g, device="cpu").to(device) if case.grad and case.lse_grad else None
    if grad_lse is not None and case.dtype == torch.float64:
        grad_lse = grad_lse.double()
    of_heads = [case.batch, heads_q][2 - len(case.slopes) :]
    slopes = 0.05 * torch.randn(of_heads, generator=g, device="cpu").to(device) if case.slopes else None
    sinks = torch.randn(heads_q, generator=g, device="cpu").to(device) if case.sinks else None
    state = torch.randint(-(2**63), 2**63 - 1, (2,), generator=g, device="cpu").to(device) if case.call.dropout_p else None
    return Inputs(q, k, v, mask, case.mask_grad, case.planned and mask is not None, grad_out, grad_lse, slopes, sinks, state)


BANDS = {
    "full": Call(),
    "causal": Call(is_causal=True),
    "causal_br": Call(is_causal=True, bottom_right=True),
    "self_only": Call(window=(0, 0)),
    "window_3_0": Call(window=(3, 0)),
    "window_20_5": Call(window=(20, 5)),
    "window_64_63": Call(window=(64, 63)),
    "window_left": Call(window=(17, -1)),
    "window_right": Call(window=(-1, 10)),
    "window_right_br": Call(window=(-1, 2), bottom_right=True),
    "window_br": Call(window=(70, 0), bottom_right=True),
    "window_causal": Call(window=(30, 9), is_causal=True),
}
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 200, 257, 300)
DIMS = ((0, 8), (1, 1), (3, 3), (8, 8), (32, 32), (40, 40), (64, 64), (70, 70), (72, 72), (80, 80), (96, 96), (128, 128),
        (160, 160), (200, 200), (256, 256), (192, 128), (5, 70), (64, 1), (1, 64), (24, 0))
HEADS = ((1, 1), (2, 2), (2, 1), (4, 1), (8, 2), (7, 1), (8, 1), (6, 3))
SEQS = ((1, 1), (1, 300), (300, 1), (64, 64), (65, 63), (63, 65), (128, 200), (257, 64), (129, 127), (2, 257), (200, 300))

# --- named lists ------------------------------------------------------------------------------------------------------


def _cycle(items):
    return itertools.cycle(items).__next__


def length_cases():
    """Every pair of lengths around the tile edges, dtypes and causal alignments in turn; forward only."""
    dtype, band = _cycle(FLOATS), _cycle(("full", "causal", "causal_br"))
    return [Case(f"{sq}x{sk}-{name}", seq=(sq, sk), dim=(16, 16), dtype=dtype(), call=BANDS[name], grad="")
            for sq in LENGTHS for sk in LENGTHS for name in (band(),)]


def dim_cases():
    return [Case(f"D{d}-Dv{dv}", seq=(70, 130), dim=(d, dv), dtype=dtype, call=BANDS[band])
            for d, dv in DIMS for dtype, band in zip(FLOATS, ("full", "causal", "full", "window_20_5"))]


def band_cases():
    dtype = _cycle(FLOATS)
    return [Case(f"{name}-{sq}x{sk}", seq=(sq, sk), dtype=dtype(), call=band, lse_grad=True)
            for name, band in BANDS.items() for sq, sk in SEQS]


def head_cases():
    """GQA, with masks that differ by head, so that a wrong kv head or mask head shows."""
    dtype = _cycle(FLOATS)
    return [Case(f"heads{hq}_{hkv}-{mask or 'dense'}", batch=2, heads=(hq, hkv), seq=(66, 130), dtype=dtype(), mask=mask,
                 mask_grad=mask == "bias:hqk", call=BANDS["causal" if not mask else "full"])
            for hq, hkv in (*HEADS, (14, 2)) for mask in ("", "random", "bias:hqk")]


def scale_cases():
    return [Case(f"scale{scale}", seq=(65, 129), dim=(24, 24), dtype=dtype, call=Call(is_causal=i % 2 > 0, scale=scale),
                 lse_grad=True)
            for i, scale in enumerate((0.0, 1.0, -0.7, 3.0, 1e-6)) for dtype in FLOATS]


def mask_kind_cases():
    """Every kind of mask in every dtype, with and without its plan, with its gradient where it has one."""
    planned = _cycle((True, False, True))
    return [Case(f"{kind}-{'causal' if causal else 'full'}", batch=2, seq=(130, 200), dim=(24, 24), dtype=dtype, mask=kind,
                 mask_grad=not kind.startswith(_BOOL_KINDS), planned=planned(), call=Call(is_causal=causal))
            for kind in MASK_KINDS for i, dtype in enumerate(FLOATS) for causal in (i % 2 > 0,)]


_BOOL_KINDS = ("random", "causal", "padding", "prefix_lm", "checkerboard", "window", "document", "rows_false", "granules", "one_key",
               "single_true", "all_true", "all_false")


def broadcast_cases():
    """All 16 broadcasts, bool and additive, as size-1 axes and as stride-0 axes."""
    dtype, planned = _cycle(FLOATS), _cycle((True, True, False, False, True))
    return [Case(f"{kind}-{axes or 'none'}-{strides}", batch=2, heads=(4, 2), seq=(67, 130), dim=(16, 16), dtype=dtype(),
                 mask=f"{kind}:{axes or '-'}:{strides}", mask_grad=kind != "random" and strides != "expanded",
                 planned=planned())
            for axes in BROADCASTS for kind in ("random", "bias", "bias32") for strides in ("dense", "expanded")]


def mask_stride_cases():
    dtype, planned = _cycle(FLOATS), _cycle((True, False, False))
    return [Case(f"{kind}-{axes}-{strides}", batch=2, heads=(2, 2), seq=(130, 131), dim=(16, 16), dtype=dtype(),
                 mask=f"{kind}:{axes}:{strides}", mask_grad=kind == "bias", planned=planned())
            for strides in MASK_STRIDES for axes in ("bhqk", "qk", "hqk", "bk") for kind in ("granules", "bias", "bias32")]


def decode_cases():
    """Few queries, many keys: the keys are split among the workers."""
    cases = []
    for i, (sq, sk) in enumerate(((1, 8192), (1, 4099), (1, 1000), (2, 2049), (4, 513), (3, 127), (8, 8191))):
        for j, mask in enumerate(("", "padding:bk", "random:bhqk", "bias:hk", "all_false:bk", "granules:bhqk")):
            dtype = FLOATS[(i + j) % 4]
            band = ("full", "causal_br", "window_br")[(i + j // 2) % 3]
            cases.append(Case(f"decode{sq}x{sk}-{mask or 'dense'}-{band}", batch=1 + i % 2, heads=((8, 2), (4, 1), (2, 2))[j % 3],
                              seq=(sq, sk), dim=((64, 64), (128, 128), (80, 40))[(i + j) % 3], dtype=dtype, mask=mask,
                              planned=j % 2 > 0, call=BANDS[band], grad="" if j % 2 else "dense", lse_grad=True))
    return cases


def score_term_cases():
    """Soft cap, slopes and sinks, alone and together, over bands, masks, grouped heads and dtypes."""
    terms = _cycle([(cap, slopes, sinks) for cap in (0.0, 1.5, 30.0) for slopes in ("", "h", "bh") for sinks in (False, True)
                    if cap or slopes or sinks])
    mask = _cycle(("", "random", "bias:hqk", "", "rows_false:hq", "bias_inf", "padding:bk", "bias32:qk", "one_key:bhqk"))
    dtype, heads, planned = _cycle(FLOATS), _cycle(((2, 2), (4, 2), (3, 1))), _cycle((True, False, True, False, False))
    cases = []
    for name, band in BANDS.items():
        for sq, sk in (*SEQS, (70, 0), (3, 700), (1, 1500)):
            (cap, slopes, sinks), recipe = terms(), mask() if sk else ""
            text = f"{name}-{sq}x{sk}-{recipe or 'dense'}-cap{cap}-slopes_{slopes}-{'sinks' if sinks else 'none'}"
            cases.append(Case(text, 2, heads(), (sq, sk), (24, 40), dtype(), recipe, recipe.startswith("bias"), planned(),
                              replace(band, softcap=cap), lse_grad=True, slopes=slopes, sinks=sinks))
    return cases


def dropout_cases():
    """Dropout with every band, mask, dtype, grouping and score term; both kernels of the forward."""
    p = _cycle((0.1, 0.5, 0.001, 0.9, 0.25))
    mask = _cycle(("", "random", "bias:hqk", "", "rows_false:hq", "bias_inf", "granules:qk", "bias32:qk", "padding:bk"))
    dtype, heads, planned = _cycle(FLOATS), _cycle(((2, 2), (4, 2), (3, 1))), _cycle((True, False, True, False, False))
    terms = _cycle(((0.0, "", False), (0.0, "", True), (0.0, "", False), (3.0, "h", False), (0.0, "", False), (5.0, "bh", True)))
    cases = []
    for name, band in BANDS.items():
        for sq, sk in (*SEQS[1:], (70, 0), (3, 700)):
            (cap, slopes, sinks), recipe = terms(), mask() if sk else ""
            call = replace(band, softcap=cap, dropout_p=p())
            text = f"{name}-{sq}x{sk}-{recipe or 'dense'}-p{call.dropout_p}-cap{cap}-slopes_{slopes}-{'sinks' if sinks else 'none'}"
            cases.append(Case(text, 2, heads(), (sq, sk), (24, 40), dtype(), recipe, recipe.startswith("bias"), planned(),
                              call, lse_grad=True, slopes=slopes, sinks=sinks))
    return cases


def zero_cases():
    """A size of zero on every axis in turn, and two at once."""
    sizes = dict(batch=dict(batch=0), heads=dict(heads=(0, 0)), queries=dict(seq=(0, 65)), keys=dict(seq=(65, 0)),
                 both=dict(seq=(0, 0)), dim=dict(dim=(0, 32)), dim_v=dict(dim=(32, 0)), all_dims=dict(dim=(0, 0)))
    return [Case(f"zero_{name}-{mask or 'dense'}", dtype=dtype, mask=mask, mask_grad=mask == "bias", **size)
            for name, size in sizes.items() for mask in ("", "bias") for dtype in (torch.float32, torch.bfloat16)]


def grad_layout_cases():
    return [Case(f"grad_{grad}-{heads[0]}_{heads[1]}", batch=2, heads=heads, seq=(65, 130), dim=(dim, dim), dtype=dtype,
                 grad=grad, lse_grad=i % 2 > 0)
            for i, grad in enumerate(GRAD_LAYOUTS) for heads, dim, dtype in
            (((2, 2), 32, torch.float32), ((4, 2), 40, torch.bfloat16), ((2, 1), 64, torch.float16), ((2, 2), 7, torch.float64))]


def layout_cases():
    """Every layout for q, k and v at once, and in turn with others."""
    dtype = _cycle(FLOATS)
    names = list(LAYOUTS)
    same = [Case(f"all_{name}", batch=2, heads=(3, 3), seq=(66, 66), dim=(40, 40), dtype=dtype(), layout=(name,) * 3,
                 lse_grad=True) for name in names]
    mixed = [Case(f"q_{a}-k_{b}-v_{c}", batch=2, heads=(4, 2), seq=(65, 129), dim=(24, 17), dtype=dtype(), layout=(a, b, c))
             for a, b, c in zip(names, names[5:] + names[:5], names[9:] + names[:9])]
    return same + mixed
