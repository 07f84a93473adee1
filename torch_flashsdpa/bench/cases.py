"""The named cases, and the grids that group them."""

from dataclasses import dataclass, replace

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    """One call of scaled_dot_product_attention: q (batch, heads, seq_q, dim), k and v (batch, heads_kv, seq_k, dim).

    mask: "full" (none), "causal" (is_causal), "causal bool" (the same as a dense mask), "half padded" ((B, 1, 1, Sk), the
    last half of the keys off), "window 256" (|i - j| < 256, a dense bool mask), "sliding 256" (0 <= i - j < 256, the same),
    "random bool" (every granule mixed).
    """

    section: str  # what the case is for: dense, mask, decode, host, memory, grid
    seq_q: int
    seq_k: int
    dim: int
    dtype: str = "float32"
    batch: int = 1
    heads: int = 8
    heads_kv: int = 8
    mask: str = "full"
    grad: bool = False
    dropout: float = 0.0
    pairs: int | None = None  # interleaved repetitions; None leaves it to the run

    @property
    def name(self):
        """For instance "D64 full B1 H8 S2048"."""
        heads = f"H{self.heads}" if self.heads == self.heads_kv else f"H{self.heads}/{self.heads_kv}"
        length = f"S{self.seq_q}" if self.seq_q == self.seq_k else f"Sq{self.seq_q} Sk{self.seq_k}"
        dropout = f" dropout {self.dropout}" if self.dropout else ""
        return f"D{self.dim} {self.mask} B{self.batch} {heads} {length}{dropout}"

    @property
    def pass_name(self):
        return "fwd+bwd" if self.grad else "fwd"

    @property
    def kind(self):
        """The word under which the table of "auto" files the case."""
        if self.dropout:
            return "dropout"
        return self.mask if self.mask in ("full", "causal") else "mask"

    def make_mask(self):
        """The dense bool mask, broadcastable to (batch, heads, seq_q, seq_k), or None."""
        rows = torch.arange(self.seq_q)[:, None]
        cols = torch.arange(self.seq_k)[None, :]
        if self.mask == "causal bool":
            return cols <= rows
        if self.mask == "window 256":
            return (rows - cols).abs() < 256
        if self.mask == "sliding 256":
            return (cols <= rows) & (rows - cols < 256)
        if self.mask == "half padded":
            return (cols < self.seq_k // 2).expand(self.batch, 1, 1, self.seq_k).contiguous()
        if self.mask == "random bool":
            return torch.rand(self.seq_q, self.seq_k) < 0.5
        return None

    def make(self):
        """The keyword arguments of the call, from torch's generator: random normal inputs."""
        dtype = DTYPES[self.dtype]

        def normal(heads, length):
            return torch.randn(self.batch, heads, length, self.dim).to(dtype).requires_grad_(self.grad)

        return {
            "query": normal(self.heads, self.seq_q),
            "key": normal(self.heads_kv, self.seq_k),
            "value": normal(self.heads_kv, self.seq_k),
            "attn_mask": self.make_mask(),
            "is_causal": self.mask == "causal",
            "dropout_p": self.dropout,
            "enable_gqa": self.heads != self.heads_kv,
        }

    def allowed_pairs(self):
        """How many (query, key) pairs of one head take part, averaged over the batch: FLOP are counted over these."""
        full = self.seq_q * self.seq_k
        if self.mask == "causal":
            return int((torch.arange(self.seq_q).clamp(max=self.seq_k - 1) + 1).sum())
        if self.mask == "half padded":
            return full // 2
        if self.mask == "random bool":
            return full // 2
        mask = self.make_mask()
        return full if mask is None else int(mask.sum())

    def flop(self):
        """4 per allowed pair and dimension forward, 2.5 times that backward."""
        return 4 * self.batch * self.heads * self.dim * self.allowed_pairs() * (3.5 if self.grad else 1.0)

    def bytes_read(self):
        """K and V, each once: what decoding cannot avoid."""
        size = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return 2 * self.batch * self.heads_kv * self.seq_k * self.dim * size


def _both_passes(cases):
    return [replace(case, grad=grad) for case in cases for grad in (False, True)]


def _dense(seq):
    return [Case("dense", seq, seq, dim, dtype) for dim in (64, 128) for dtype in ("float32", "bfloat16")]


def _masks(seq):
    kinds = ("causal bool", "half padded", "window 256", "sliding 256")
    return [replace(case, section="mask", mask=mask) for mask in kinds for case in _dense(seq)]


def _decode(seq):
    return [Case("decode", 1, seq, 128, dtype, heads=32, heads_kv=8) for dtype in ("float32", "bfloat16")]


def _host():
    return [Case("host", 16, 16, 64, dtype, heads=4, heads_kv=4) for dtype in ("float32", "bfloat16")]


def _memory():
    return [Case("memory", seq, seq, 64, grad=True, pairs=3) for seq in (1024, 2048, 4096, 8192)]


def _auto():
    """The calls that "auto" decides by: every dtype and kind at head dims and lengths that span factors of 8 and 32."""
    cases = []
    for dtype in DTYPES:
        for dim in (32, 64, 128, 256) if dtype in ("float32", "bfloat16") else (64, 128):
            base = Case("grid", 0, 0, dim, dtype, heads=4, heads_kv=4, pairs=7)
            for mask in ("full", "causal", "half padded", "random bool"):
                cases += _both_passes(replace(base, seq_q=n, seq_k=n, mask=mask) for n in (32, 128, 1024))
            for mask in ("full", "causal"):
                cases += _both_passes(replace(base, seq_q=n, seq_k=n, mask=mask, dropout=0.1) for n in (32, 128, 1024))
            for mask in ("full", "half padded"):
                cases += [replace(base, seq_q=1, seq_k=n, mask=mask) for n in (128, 1024, 8192)]
    return cases


GRIDS = {
    "cpu": lambda: _both_passes(_dense(2048) + _masks(2048)) + _decode(8192) + _both_passes(_host()) + _memory(),
    "small": lambda: _both_passes(_dense(512) + _masks(512)[:4]) + _decode(2048) + _both_passes(_host()),
    "auto": _auto,
}
