"""What must be refused: one change each of the arguments of a valid call, and the words of the refusal."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from cases import FLOATS, dtype_name

from torch_flashsdpa._loader import binding

FUNCTIONS = ("attention", "op")  # what takes more than SDPA


@dataclass(frozen=True)
class Fault:
    text: str  # a pattern that the exception's text holds
    change: Callable  # of the arguments, a dict, in place
    needs: dict = field(default_factory=dict)  # {option: its values with which this fault can be made}
    everywhere: bool = True  # False: on devices that do not serve it
    option: str = ""  # of what a device does not serve: the option, and the values of it that are this fault
    values: tuple = ()

    def fits(self, name, value):
        return name not in self.needs or value in self.needs[name]

    def about(self, name, value):
        return name == self.option and value in self.values


def _set(**values):
    return lambda a: a.update(values)


def _zeros(name, **sizes):
    """`name` as zeros, with other sizes on some axes: last=, length= or heads=, each given the size there was."""
    def change(a):
        shape = list(a[name].shape)
        for axis, size in sizes.items():
            at = {"last": -1, "length": -2, "heads": -3}[axis]
            shape[at] = size(shape[at])
        a[name] = a[name].new_zeros(shape)

    return change


def _both(*changes):
    def change(a):
        for one in changes:
            one(a)

    return change


def _dtype(dtype, *names):
    return lambda a: a.update({name: a[name].detach().to(dtype) for name in names})


def _other_float(a, name):
    return torch.float32 if a[name].dtype == torch.float64 else torch.float64


def _mask(shape):
    """Another mask, of ones: shape(rank, seq_q, seq_k)."""
    def change(a):
        q, k = a["query"], a["key"]
        a["attn_mask"] = q.new_ones(shape(q.dim(), q.size(-2), k.size(-2)), dtype=torch.bool)
        a.pop("mask_plan", None)

    return change


def _per_head(name, **options):
    def change(a):
        heads = a["query"].size(-3) if a["query"].dim() > 2 else 1
        a[name] = torch.ones(heads + options.get("more", 0), dtype=options.get("dtype", torch.float32),
                             device=a["query"].device, requires_grad=options.get("requires_grad", False))

    return change


def _window(a):
    a.update({"window": (-2, 0)} if "window" in a else {"window_left": -2})


def _crossed_batch_axes(a):
    a["query"] = a["query"].transpose(0, 1).contiguous().transpose(0, 1)


MASKED = {"mask": ("random", "rows_false", "bias", "bias_inf", "zeros", "bias32")}
HEADS = {"rank": (3, 4, 5)}
ROUTED_5D = {"path": ("sdpa",), "rank": (5,), "batch": (2,)}
EXTRA = {"path": FUNCTIONS}
FAULTS = {
    "head_dim": Fault("head_dim is 257; supported: 0 to 256",
                      _both(_zeros("query", last=lambda n: 257), _zeros("key", last=lambda n: 257))),
    "value_dim": Fault("head_dim of value is 300; supported: 0 to 256", _zeros("value", last=lambda n: 300)),
    "key_dim": Fault("query and key head_dim differ; give equal ones", _zeros("key", last=lambda n: n + 1 if n < 256 else 5)),
    "lengths": Fault("key and value lengths differ; give equal ones", _zeros("value", length=lambda n: n + 2)),
    "value_heads": Fault("key and value heads differ; give equal counts", _zeros("value", heads=lambda n: n + 2), HEADS),
    "integer": Fault("dtype is int32; supported on ", _dtype(torch.int32, "query", "key", "value")),
    "dtypes": Fault("query, key, value have dtypes .*; give one dtype",
                    lambda a: _dtype(_other_float(a, "query"), "key")(a)),
    "mask_integer": Fault("attn_mask has dtype int64; supported: bool, float32, or the query's", _dtype(torch.int64, "attn_mask"),
                          MASKED),
    "mask_dtype": Fault(r"attn_mask has dtype float(64|16); supported: bool, float32, or the query's",
                        lambda a: _dtype(torch.float16 if a["query"].dtype == torch.float64 else torch.float64, "attn_mask")(a),
                        MASKED),
    "mask_size": Fault("attn_mask .* does not broadcast to", _mask(lambda rank, sq, sk: (1,) * (rank - 2) + (sq + 2, sk))),
    "mask_axes": Fault(r"attn_mask (has \d (axes|dimensions), query \d|\(.*\) does not broadcast)",
                       _mask(lambda rank, sq, sk: (1,) * (rank - 1) + (sq, sk))),
    "dropout": Fault("dropout_p is 1.25; give a probability from 0 to 1", _set(dropout_p=1.25)),
    "softcap": Fault("softcap is -1; give a positive number, or 0 for none", _set(softcap=-1.0), EXTRA),
    "window": Fault("window_left is -2, window_right is -?[0-9]+; give 0 or more keys, or -1 for no limit", _window, EXTRA),
    "slopes_size": Fault(r"alibi_slopes is \(.*\); give \(", _per_head("alibi_slopes", more=1), EXTRA),
    "slopes_grad": Fault("alibi_slopes requires a gradient .* computes neither; give alibi_slopes.detach",
                         _per_head("alibi_slopes", requires_grad=True), EXTRA),
    "sinks_dtype": Fault("sinks is bfloat16 on .*; give float32 on ", _per_head("sinks", dtype=torch.bfloat16), EXTRA),
    "random_state": Fault("dropout_p is 0.5 and rng_state is not given; give flashsdpa::rng_state",
                          _set(dropout_p=0.5, rng_state=None), {"path": ("op",)}),
    "grouped": Fault("query has 4 heads, key 2; .*give equal counts", _set(enable_gqa=False),
                     {"path": ("attention", "sdpa"), "heads": ((4, 2),), "rank": (3, 4, 5)}),
    "mask_of_some_batch_axes": Fault("attn_mask broadcasts over some of the 2 batch axes",
                                     _mask(lambda rank, sq, sk: (2, 1, 1, sq, sk)), ROUTED_5D),
    "batch_axes_crossed": Fault("query has 5 dimensions whose leading strides are not one batch axis; make it contiguous",
                                _crossed_batch_axes, ROUTED_5D | {"seq_q": (2, 9, 64), "dim": (3, 8, 16)}),
}


def _missing(option, values, text, change, needs=EXTRA):
    return Fault(text, change, needs, everywhere=False, option=option, values=values)


def _dropout(a):
    a["dropout_p"] = 0.25
    if "rng_state" in a:
        a["rng_state"] = torch.zeros(2, dtype=torch.int64, device=a["query"].device)


# {feature of the kernel table: the fault that it is without it}
FEATURES = {
    "softcap": _missing("softcap", (1.5, 30.0), "softcap is 2; .* takes 0", _set(softcap=2.0)),
    "alibi": _missing("slopes", ("h", "bh"), "alibi_slopes is given; .* takes none", _per_head("alibi_slopes")),
    "sinks": _missing("sinks", (True,), "sinks is given; .* takes none", _per_head("sinks")),
    "dropout": _missing("dropout_p", (0.25, 1.0, 1e-9), "dropout_p is 0.25; .* takes 0", _dropout, {}),
    "batch_invariant": _missing("batch_invariant", (True,), "batch_invariant is True; .* takes False", _set(batch_invariant=True)),
}
DTYPES = {dtype_name(d): _missing("dtype", (d,), f"dtype is {dtype_name(d)}; supported on ",
                                  _dtype(d, "query", "key", "value"), {}) for d in FLOATS}
FAULTS |= {f"no_{name}": fault for name, fault in (FEATURES | DTYPES).items()}


def entries_of(device):
    """The attention kernels for the device, of the table."""
    entries = [e for e in binding().kernel_table() if e["device"] == device and e["pass"] in ("forward", "backward")]
    assert entries, f"no kernel for {device} in this build"
    return entries


def features_of(device):
    """{dtype: the features that its kernels, all of them, have}; a mask's gradient is the backward's alone."""
    of_dtype = {}
    for entry in entries_of(device):
        features = set(entry["features"]) | ({"bias_grad"} if entry["pass"] == "forward" else set())
        for name in entry["dtypes"]:
            of_dtype[name] = of_dtype.get(name, features) & features
    return of_dtype


def unserved(device):
    """{name: fault}, of what no kernel for the device serves in any dtype."""
    features = features_of(device)
    lacking = [name for name in FEATURES if name not in set.union(*features.values())]
    return {f"no_{name}": FAULTS[f"no_{name}"] for name in lacking + [name for name in DTYPES if name not in features]}


def served_together(device):
    """Rules (option, option, which values fit): of what a dtype's kernels lack and another's have."""
    options = {name: (fault.option, fault.values) for name, fault in FEATURES.items()} | {"bias_grad": ("mask_grad", (True,))}
    features = features_of(device)

    def rule(feature, values):
        return lambda dtype, value: value not in values or feature in features.get(dtype_name(dtype), ())

    partly = [name for name in options if any(name not in have for have in features.values())]
    return [("dtype", options[name][0], rule(name, options[name][1])) for name in partly]
