"""Every option of a call in one table, and one row of it held against both oracles.

A row names a value for each option; the paths are the op, attention() and F.scaled_dot_product_attention. Rows come from
covering.py (every pair of values), or from `rows()`, a hypothesis strategy. A row with a fault must be refused, with the text
that the fault states; a row without one must be served. What a device does not serve (kernel_table) is a fault there.
"""

import contextlib
import functools
import random
import re
from dataclasses import replace

import covering
import torch
from cases import BROADCASTS, FLOATS, GRAD_LAYOUTS, LAYOUTS, MASK_STRIDES, Case, inputs, placed
from hypothesis import strategies as st
from matrix_faults import FAULTS, served_together, unserved
from oracle import INF, SEED, Call, check, check_counting, ops, run_op

import torch_flashsdpa

BOOL_MASKS = ("random", "causal", "padding", "rows_false", "granules", "one_key", "all_true", "all_false")
FLOAT_MASKS = ("bias", "bias32", "bias_inf", "alibi", "lowest", "zeros", "all_inf")
OPTIONS = dict(
    path=("attention", "op", "sdpa"),
    rank=(4, 2, 3, 5),
    dtype=FLOATS,
    batch=(1, 2),
    heads=((1, 1), (2, 2), (2, 1), (4, 2), (3, 1)),
    seq_q=(1, 2, 9, 63, 64, 65, 130, 0),
    seq_k=(1, 2, 5, 64, 65, 127, 129, 200, 0),
    dim=(1, 3, 8, 16, 40, 64, 72, 80, 96, 128, 200, 256, 0),
    dim_v=(1, 3, 8, 16, 40, 64, 70, 80, 96, 128, 192, 256, 0),
    q_layout=tuple(LAYOUTS),
    k_layout=tuple(LAYOUTS),
    v_layout=tuple(LAYOUTS),
    mask=("", *BOOL_MASKS, *FLOAT_MASKS),
    mask_axes=("bhqk", *(axes or "-" for axes in BROADCASTS[:-1])),
    mask_strides=(*MASK_STRIDES, "expanded"),
    mask_squeezed=(False, True),  # without its leading axes of size 1
    mask_grad=(False, True),
    planned=(False, True),
    is_causal=(False, True),
    bottom_right=(False, True),
    left=(-1, 0, 3, 64),
    right=(-1, 0, 5, 63),
    scale=(None, 0.3, -0.5, 0.0),
    softcap=(0.0, 1.5, 30.0),
    slopes=("", "h", "bh"),
    sinks=(False, True),
    dropout_p=(0.0, 0.25, 1.0, 1e-9),
    grad=("", *GRAD_LAYOUTS),
    lse_grad=(False, True),
    deterministic=(False, True),
    batch_invariant=(False, True),
    threads=(1, 2),
    fault=("",),
)
SIMPLEST = {name: values[0] for name, values in OPTIONS.items()} | {"numbers": 0}  # numbers: which random ones
SIZES = ("seq_q", "seq_k", "dim", "dim_v")
MASK_OPTIONS = ("mask_axes", "mask_strides", "mask_squeezed", "mask_grad", "planned")
SAME_COLUMNS = ("expand_last", "expand_all")
BEYOND_SDPA = ("left", "right", "bottom_right", "softcap", "slopes", "sinks", "lse_grad", "planned")


def _only_simplest(name, value, other):
    """The rule that beside this value the other option has its simplest one."""
    return name, other, lambda x, y: x != value or y == SIMPLEST[other]


RULES = [
    ("path", "rank", lambda path, rank: path != "op" or rank == 4),
    ("rank", "batch", lambda rank, batch: rank > 3 or batch == 1),
    ("rank", "heads", lambda rank, heads: rank > 2 or heads == (1, 1)),
    ("rank", "planned", lambda rank, planned: rank < 5 or not planned),  # plan_mask() takes four axes
    ("mask", "mask_grad", lambda mask, grad: mask in FLOAT_MASKS or not grad),
    *(_only_simplest("mask", "", name) for name in MASK_OPTIONS),
    *(_only_simplest("grad", "", name) for name in ("mask_grad", "lse_grad")),
    *(_only_simplest("path", "sdpa", name) for name in BEYOND_SDPA),
    _only_simplest("path", "op", "mask_squeezed"),
    # Where all terms of a dot product are equal, its sum rounds in one direction, in ours up to four times as far as in the math
    # path's, which sums in shorter parts.
    ("q_layout", "k_layout", lambda q, k: q not in SAME_COLUMNS or k not in SAME_COLUMNS),
    ("v_layout", "grad", lambda v, grad: v not in SAME_COLUMNS or grad != "sum"),
    *(("fault", name, lambda fault, value, name=name: not fault or FAULTS[fault].fits(name, value)) for name in OPTIONS
      if name != "fault"),
]


@functools.cache
def rules_on(device):
    return RULES + served_together(device)


@functools.cache
def options_on(device):
    """The table with the values that the kernels of the device serve, and the faults that they refuse."""
    missing = unserved(device)
    served = {name: tuple(v for v in values if not any(fault.about(name, v) for fault in missing.values()))
              for name, values in OPTIONS.items()}
    if device == "cuda":  # the edges of its larger tiles
        served |= {name: (*served[name], 257, 333) for name in ("seq_q", "seq_k")}
    faults = [name for name, fault in FAULTS.items() if name in missing or fault.everywhere]
    return served | {"fault": ("", *faults)}


def served_rows(device, number):
    """One covering array, of calls to be served. Which rows, follows from the session's seed and the array's number."""
    rng = random.Random(f"{SEED} {device} {number}")
    for row in covering.covering_rows(options_on(device) | {"fault": ("",)}, rules_on(device), rng):
        yield row | {"numbers": number}


def refused_rows(device, number):
    """Rows in which every fault stands with every value of every option. (Of two faults in a call, one is masked.)"""
    rng = random.Random(f"{SEED} {device} {number} refused")
    options = options_on(device) | {"fault": options_on(device)["fault"][1:]}
    rules = rules_on(device)
    pairs = covering.all_pairs(options, covering.forbidden_pairs(options, rules))
    of_faults = {pair for pair in pairs if "fault" in (pair[0][0], pair[1][0])}
    for row in covering.covering_rows(options, rules, rng, of_faults):
        yield row | {"numbers": number}


@functools.cache
def _draws(device):
    """[(name, its values, what draws one, the rules about it)]; of sizes, those between the table's too."""
    draws = []
    for name, values in options_on(device).items():
        drawn = st.sampled_from(values)
        if name in SIZES:
            drawn = st.one_of(st.integers(1, 256 if name in ("dim", "dim_v") else 140), drawn)
        draws.append((name, values, drawn, [rule for rule in rules_on(device) if name in rule[:2]]))
    return draws[:-1]  # the last is the fault


@st.composite
def rows(draw, device="cpu"):
    """Rows to be served, with sizes between the table's too; hypothesis makes a failing one simple."""
    row = dict(SIMPLEST, numbers=draw(st.integers(0, 3)))
    settled = {"fault"}
    for name, values, drawn, about in _draws(device):
        settled.add(name)

        def fits(value):
            tried = {**row, name: value}
            return all(fits(tried[a], tried[b]) for a, b, fits in about if a in settled and b in settled)

        # As many choices are drawn for every row, those that do not fit too: a change of one leaves the others alone.
        value = draw(drawn)
        row[name] = value if fits(value) else next(filter(fits, values))
    return row


# --- a row as a call --------------------------------------------------------------------------------------------------


def text(row):
    """What differs from the simplest call, as keyword arguments of hold()."""
    return ", ".join(f"{name}={value!r}" for name, value in row.items() if value != SIMPLEST[name])


def as_code(row, device="cpu"):
    """A command that makes the call of the row again, from the repository root."""
    of_device = "" if device == "cpu" else f", device={device!r}"
    return (f'FLASHSDPA_TEST_SEED={SEED} PYTHONPATH=.:tests python -c "import torch; from matrix import hold; '
            f'hold({text(row)}{of_device})"')


def case_of(row):
    axes, strides = row["mask_axes"], row["mask_strides"]
    call = Call(row["is_causal"], row["bottom_right"], (row["left"], row["right"]), row["scale"], row["softcap"], row["dropout_p"])
    return Case(f"matrix {text(row)}", row["batch"] * (2 if row["rank"] == 5 else 1), row["heads"], (row["seq_q"], row["seq_k"]),
                (row["dim"], row["dim_v"]), row["dtype"], row["mask"] and f"{row['mask']}:{axes}:{strides}", row["mask_grad"],
                row["planned"], call, (row["q_layout"], row["k_layout"], row["v_layout"]), row["grad"], row["lse_grad"],
                row["slopes"], row["sinks"])


def tensors_of(row, case, device):
    if device == "cpu":
        x = inputs(case)
    else:
        with torch.device("cpu"):
            x = inputs(case)
        x = replace(x, **{name: placed(t, device) for name, t in vars(x).items() if isinstance(t, torch.Tensor)})
    if case.call.dropout_p and row["path"] != "op":  # the state that the call will draw
        torch.manual_seed(row["numbers"])
        x.rng_state = ops().rng_state(device=device)
    return x


def ranked(t, row):
    """A 4-D tensor with the row's number of axes; of five, the first two are (2, batch)."""
    if t is None or row["rank"] == 4:
        return t
    if row["rank"] == 5:
        return t.unflatten(0, (2, row["batch"])) if t.size(0) == 2 * row["batch"] else t[None]
    return t[0] if row["rank"] == 3 else t[0, 0]


def squeezed(mask):
    while mask.dim() > 2 and mask.size(0) == 1:
        mask = mask[0]
    return mask


def arguments_of(row, q, k, v, attn_mask=None, mask_plan=None, rng_state=None, **options):
    """The arguments that the row's path takes, of those of the op."""
    mask = ranked(attn_mask, row)
    if row["mask_squeezed"] and mask is not None:
        mask = squeezed(mask)
    same = dict(query=ranked(q, row), key=ranked(k, row), value=ranked(v, row), attn_mask=mask)
    extra = dict(deterministic=row["deterministic"], batch_invariant=row["batch_invariant"])
    if row["path"] == "op":
        return same | extra | options | dict(mask_plan=mask_plan, rng_state=rng_state)
    grouped = dict(enable_gqa=q.size(1) != k.size(1))
    if row["path"] == "sdpa":
        return same | grouped | {name: options[name] for name in ("is_causal", "scale", "dropout_p") if name in options}
    window = options.pop("window_left"), options.pop("window_right")
    return same | extra | grouped | options | dict(window=window, mask_plan=mask_plan, return_lse=True)


def call_path(row, arguments):
    """(out, lse) of the row's path, lse None of SDPA."""
    if row["dropout_p"]:
        torch.manual_seed(row["numbers"])
    if row["path"] == "sdpa":
        return torch.nn.functional.scaled_dot_product_attention(**arguments), None
    if row["path"] == "attention":
        return torch_flashsdpa.attention(**arguments)
    return ops().forward(**arguments)


def forward_of(row):
    """What stands for flashsdpa::forward: the row's path, given and giving 4-D tensors."""
    def forward(q, k, v, **options):
        out, lse = call_path(row, arguments_of(row, q, k, v, **options))
        out = out.reshape(*q.shape[:3], v.size(3))
        return out, lse if lse is None else lse.reshape(q.shape[:3])

    return forward


@contextlib.contextmanager
def settings(row):
    """The number of threads, and for SDPA what it has no argument for."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(row["threads"])
    try:
        if row["path"] != "sdpa":
            yield
            return
        torch.use_deterministic_algorithms(row["deterministic"])
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True, batch_invariant=row["batch_invariant"]):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


# --- what must hold ---------------------------------------------------------------------------------------------------


def hold(device="cpu", **options):
    """Makes the call of the row: refused as its fault says, or right by both oracles. Options not named are the simplest."""
    row = {**SIMPLEST, **options}
    case = case_of(row)
    x = tensors_of(row, case, device)
    if row["fault"]:
        return check_refused(row, x, case.call)

    def run(x, call):
        with settings(row):
            return run_op(x, call, forward_of(row))

    got = check(x, case.call, run)
    if row["deterministic"]:
        check_same_bits(got, run(x, case.call), "a second run")
    if row["batch_invariant"] and row["rank"] == 4 and row["batch"] > 1 and not case.call.dropout_p:
        check_same_bits(last_sequence(got), run(last_sequence_alone(x), case.call), "the last sequence alone")
    if min(case.seq):
        count_pairs(row, case, x)


def check_refused(row, x, call):
    """An exception that says what the fault says, and no kernel has run."""
    fault = FAULTS[row["fault"]]
    before = torch_flashsdpa.routed_calls()
    try:
        with settings(row):
            arguments = arguments_of(row, x.q, x.k, x.v, attn_mask=x.mask, alibi_slopes=x.slopes, sinks=x.sinks,
                                     rng_state=x.rng_state, **call.op_arguments())
            fault.change(arguments)
            call_path(row, arguments)
    except RuntimeError as error:
        assert re.search(fault.text, str(error)), f"refused, but not for {fault.text!r}: {error}"
        assert torch_flashsdpa.routed_calls() == before, "refused after a kernel has run"
    else:
        raise AssertionError(f"not refused; want {fault.text!r}")


def check_same_bits(got, again, what):
    for name, one, other in (("out", got.out, again.out), ("lse", got.lse, again.lse),
                             *((name, grad, again.grads[name]) for name, grad in got.grads.items())):
        assert one is None or torch.equal(one, other), f"{name} has other bits in {what}"


def last_sequence_alone(x):
    """Of sinks and of a mask for all sequences, the gradient is a sum over the batch: they get none here."""
    last = {name: getattr(x, name)[-1:] for name in ("q", "k", "v", "grad_out", "grad_lse") if getattr(x, name) is not None}
    mask = x.mask if x.mask is None or x.mask.size(0) == 1 else x.mask[-1:]
    slopes = x.slopes if x.slopes is None or x.slopes.dim() == 1 else x.slopes[-1:]
    return replace(x, **last, mask=mask, slopes=slopes)


def last_sequence(got):
    grads = {name: got.grads[name][-1:] for name in ("dq", "dk", "dv") if name in got.grads}
    return replace(got, out=got.out[-1:], lse=None if got.lse is None else got.lse[-1:], grads=grads)


def removals(mask):
    """An additive mask that removes what this one removes and adds nothing else, in place and so with its strides."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    once = mask[tuple(slice(1) if step == 0 else slice(None) for step in mask.stride())]
    once.copy_(torch.where(once == -INF, -INF, 0.0))
    return mask


def count_pairs(row, case, x):
    """The second oracle, of the row without slopes and dropout, with which no two weights are equal."""
    width = next((n for n in (64, 128) if max(case.seq) <= n), 256)
    differentiable = row["path"] != "sdpa"  # which gives no log-sum-exp, of which the gradients are taken
    with settings(row):
        check_counting(case.batch, *case.heads, *case.seq, width, case.dtype, removals(x.mask), replace(case.call, dropout_p=0.0),
                       backward=differentiable and bool(row["grad"]), planned=x.planned, forward=forward_of(row),
                       mask_grad=row["mask_grad"], sinks=row["sinks"])


# --- many rows --------------------------------------------------------------------------------------------------------


def failure(row, device="cpu"):
    """What goes wrong with the row, in words; None if nothing does."""
    try:
        hold(device, **row)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def hold_all(rows, device="cpu"):
    """How many rows there are; fails at the first that does not hold, with its report."""
    count = 0
    for count, row in enumerate(rows, 1):
        problem = failure(row, device)
        assert problem is None, report(row, device, problem)
    return count


def cost(name, value):
    """How far a value is from the simplest: for sizes the size, 0 being the largest."""
    if name == "numbers":
        return 0
    if name in SIZES:
        return value - 1 if value else 1000
    return OPTIONS[name].index(value) if name != "fault" else 0


def simpler(name, value):
    if name in ("fault", "numbers"):
        return []
    candidates = set(OPTIONS[name]) | ({value // 2, value - 1} if name in SIZES and value > 1 else set())
    return sorted((v for v in candidates if cost(name, v) < cost(name, value)), key=functools.partial(cost, name))


def smallest(row, device="cpu"):
    """The failing row with every option as simple as can be; numbers that happen not to show the fault are tried again."""
    def failing(row):
        tries = (row | {"numbers": n} for n in range(row["numbers"], row["numbers"] + 4))
        return next((r for r in tries if failure(r, device) is not None), None)

    return covering.smallest(row, OPTIONS, rules_on(device), failing, cost, simpler)


def report(row, device="cpu", problem=None):
    """The failing row's smallest relative, as a command, and what goes wrong in both."""
    problem = problem or failure(row, device)
    least = smallest(row, device)
    return (f"hold({text(row)}): {problem}\nThe smallest call that fails too:\n    {as_code(least, device)}\n"
            f"{failure(least, device)}")
