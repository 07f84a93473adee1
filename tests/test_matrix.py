"""The matrix: pairs of all options of a call against both oracles, and the machinery that draws them and makes a failure small."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import covering
import hypothesis
import matrix
import matrix_faults
import pytest
import torch
from hypothesis import HealthCheck, given
from matrix import OPTIONS, RULES, SIMPLEST
from oracle import SEED

import torch_flashsdpa

ARRAYS = 5  # covering arrays of about 360 calls each, every one with pairs in other company and other numbers
DRAWN = 250
ISAS = ("portable", "avx2", "avx512", "amx")


@pytest.fixture(autouse=True)
def one_thread():
    """For the oracles, to whose small tensors a second one is only a cost. The calls themselves have a number of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", range(ARRAYS))
def test_every_pair_of_options(number):
    assert matrix.hold_all(matrix.served_rows("cpu", number)) > 200


@pytest.mark.parametrize("number", range(2))
def test_every_fault_beside_every_option(number):
    """What is refused by contract is refused in any company, with the exception that is stated for it."""
    assert matrix.hold_all(matrix.refused_rows("cpu", number)) > 200


@hypothesis.seed(SEED)
@hypothesis.settings(max_examples=DRAWN, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(matrix.rows())
def test_drawn_calls(row):
    """Sizes between the table's, and any three options together; a failure is made small by hypothesis itself."""
    problem = matrix.failure(row)
    assert problem is None, f"{problem}\n    {matrix.as_code(row)}"


@pytest.mark.parametrize("isa", ISAS[:-1])
def test_every_pair_of_options_on_lower_instruction_sets(run_python, isa):
    """The highest one of this machine is that of the tests above."""
    from torch_flashsdpa._loader import binding

    features = binding().cpu_features()
    if not any(features[higher] for higher in ISAS[ISAS.index(isa) + 1 :]) or not features[isa]:
        pytest.skip(f"{isa} is this processor's highest instruction set, or not its own")
    code = (f"import sys; sys.path.insert(0, {str(matrix.__file__.rsplit('/', 1)[0])!r}); import torch, matrix\n"
            f"torch.set_num_threads(1)\nmatrix.hold_all(matrix.served_rows('cpu', {100 + ISAS.index(isa)}))\nprint('held')")
    assert run_python(code, env={"TORCH_FLASHSDPA_CPU_ISA": isa, "FLASHSDPA_TEST_SEED": str(SEED)}) == "held"


# --- the array --------------------------------------------------------------------------------------------------------


def pairs_of(row):
    return set(itertools.combinations(row.items(), 2))


def test_an_array_holds_every_pair_that_can_be():
    options = matrix.options_on("cpu") | {"fault": ("",)}
    rows = [{name: row[name] for name in options} for row in matrix.served_rows("cpu", 0)]
    assert all(fits(row[a], row[b]) for row in rows for a, b, fits in RULES)
    held = set().union(*map(pairs_of, rows))

    def possible(pair):
        """Whether every rule about the two, and about each other option beside them, leaves a value."""
        chosen = dict(pair)

        def fitting(other, value):
            both = {**chosen, other: value}
            return all(fits(both[a], both[b]) for a, b, fits in RULES if a in both and b in both)

        return all(any(fitting(name, value) for value in ([chosen[name]] if name in chosen else values))
                   for name, values in options.items())

    missing = {((a, x), (b, y)) for a, b in itertools.combinations(options, 2)
               for x, y in itertools.product(options[a], options[b])} - held
    assert len(held) > 15000 and not [pair for pair in missing if possible(pair)]
    assert len(rows) < 2 * 16 * 17, "more rows than twice the two longest options ask for"


def test_arrays_of_one_seed_are_the_same_and_of_two_numbers_are_not():
    first, again, other = (list(itertools.islice(matrix.served_rows("cpu", n), 20)) for n in (0, 0, 1))
    assert first == again and [r | {"numbers": 0} for r in other] != first


def test_every_fault_is_planted_beside_every_value():
    rows = list(matrix.refused_rows("cpu", 0))
    faults = matrix.options_on("cpu")["fault"][1:]
    assert {row["fault"] for row in rows} == set(faults) and len(faults) > 15
    beside = {(row["fault"], name, value) for row in rows for name, value in row.items()}
    for fault, (name, values) in itertools.product(faults, matrix.options_on("cpu").items()):
        fits = matrix.FAULTS[fault].fits
        if not any(needed in matrix.FAULTS[fault].needs for a, b, _ in RULES if name in (a, b) for needed in (a, b)):
            assert all((fault, name, value) in beside for value in values if name != "fault" and fits(name, value)), (fault, name)


@pytest.mark.parametrize("seed", range(20))
def test_small_arrays_against_all_rows(seed):
    """A table small enough to list every row that the rules allow: exactly their pairs are in the array."""
    rng = random.Random(f"{SEED} {seed}")
    options = {name: tuple(range(rng.randint(1, 4))) for name in "abcde"}
    forbidden = {(a, rng.choice(options[a]), b, rng.choice(options[b])) for a, b in itertools.combinations("abcde", 2)}
    rules = [(a, b, lambda x, y, bad=(v, w): (x, y) != bad) for a, v, b, w in forbidden if len(options[a]) * len(options[b]) > 2]
    valid = [dict(zip(options, values)) for values in itertools.product(*options.values())]
    valid = [row for row in valid if all(fits(row[a], row[b]) for a, b, fits in rules)]
    rows = list(covering.covering_rows(options, rules, rng))
    assert all(row in valid for row in rows)
    assert set().union(*map(pairs_of, rows)) == set().union(*map(pairs_of, valid))


def test_what_a_device_does_not_serve_is_a_fault_there(monkeypatch):
    """With the features of a kernel that has few: those options leave the table, and the pairs of the others stay."""
    features = ["causal", "band", "bool_mask", "bias", "gqa", "deterministic", "bias_grad", "lse_grad", "sinks"]
    entries = [{"device": "cuda", "pass": name, "dtypes": ["bfloat16", "float16"], "features": features} for name in ("forward", "backward")]
    monkeypatch.setattr(matrix_faults, "binding", lambda: SimpleNamespace(kernel_table=lambda: entries))
    options = matrix.options_on.__wrapped__("cuda")
    lost = {"no_softcap", "no_alibi", "no_dropout", "no_batch_invariant", "no_float32", "no_float64"}
    assert {name for name in options["fault"] if name.startswith("no_")} == lost
    assert options["dtype"] == (torch.bfloat16, torch.float16) and options["softcap"] == (0.0,) and options["slopes"] == ("",)
    assert options["sinks"] == (False, True) and set(matrix.OPTIONS["seq_k"]) < set(options["seq_k"])
    conflicts = covering.forbidden_pairs(OPTIONS, RULES)
    pairs = [covering.all_pairs(table | {"fault": ("",)}, conflicts) for table in (OPTIONS, options)]
    assert len(pairs[0] & pairs[1]) > 0.7 * len(pairs[0])


# --- the smallest failing call ----------------------------------------------------------------------------------------


@pytest.fixture
def cap_lost_beside_a_mask(monkeypatch):
    """attention(), wrong for a soft cap together with a mask."""
    right = torch_flashsdpa.attention

    def wrong(**arguments):
        return right(**arguments | ({"softcap": 0.0} if arguments.get("attn_mask") is not None else {}))

    monkeypatch.setattr(torch_flashsdpa, "attention", wrong)


def test_a_failing_row_becomes_the_smallest_failing_call(cap_lost_beside_a_mask):
    row = SIMPLEST | dict(
        rank=5, dtype=torch.bfloat16, batch=2, heads=(4, 2), seq_q=65, seq_k=129, dim=96, dim_v=40, q_layout="packed",
        mask="bias_inf", mask_axes="hqk", mask_strides="corner", mask_grad=True, is_causal=True, left=64, softcap=1.5,
        sinks=True, dropout_p=0.25, grad="transposed", lse_grad=True, threads=2, deterministic=True)
    assert matrix.failure(row)
    least = matrix.smallest(row)
    assert {name for name in least if least[name] != SIMPLEST[name]} - {"numbers"} == {"mask", "softcap"}
    assert least["softcap"] == 1.5  # and one key: the log-sum-exp shows it
    report = matrix.report(row)
    assert "softcap=1.5" in report and "lse" in report.splitlines()[-1]


def test_the_reported_command_makes_the_call_again(cap_lost_beside_a_mask):
    row = SIMPLEST | dict(seq_q=3, seq_k=2, mask="all_true", dtype=torch.float16, heads=(4, 2), softcap=1.5, numbers=5)
    command = matrix.as_code(row)
    assert command.startswith(f"FLASHSDPA_TEST_SEED={SEED} ") and "dtype=torch.float16, heads=(4, 2)" in command
    code = command.split('-c "')[1].removesuffix('"')
    with pytest.raises(AssertionError) as error:
        exec(code, {})
    assert matrix.failure(row) == f"AssertionError: {error.value}"
    exec(code.replace("attention", "op").replace("softcap=1.5, ", ""), {})


def test_hypothesis_makes_a_row_simple():
    least = hypothesis.find(matrix.rows(), lambda row: row["mask"] and row["softcap"] and row["seq_k"] > 66,
                            settings=hypothesis.settings(max_examples=100, database=None), random=random.Random(SEED))
    assert least == SIMPLEST | dict(mask=OPTIONS["mask"][1], softcap=1.5, seq_k=67)


def test_a_call_that_is_not_refused_or_refused_with_other_words_is_a_failure(monkeypatch):
    row = SIMPLEST | dict(fault="lengths")
    assert matrix.failure(row) is None
    fault = matrix.FAULTS["lengths"]
    monkeypatch.setitem(matrix.FAULTS, "lengths", replace(fault, text="other words"))
    assert "refused, but not for 'other words'" in matrix.failure(row)
    monkeypatch.setitem(matrix.FAULTS, "lengths", replace(fault, change=lambda arguments: None))
    assert "not refused" in matrix.failure(row)
