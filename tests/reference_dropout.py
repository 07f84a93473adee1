"""The decisions of src/dropout.h with plain torch operations on int64: what every kernel with dropout is compared with."""

import torch

LOW = 0xFFFFFFFF


def philox4x32(counter, key):
    """The four words of Philox4x32-7 (Salmon et al. 2011), of a counter of four words and a key of two, int64 below 2^32."""
    c, k = [torch.as_tensor(word) for word in counter], [torch.as_tensor(word) for word in key]
    for _ in range(7):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # modulo 2^64, whose bits are right whatever the sign
        c = [b >> 32 & LOW ^ c[1] ^ k[0], b & LOW, a >> 32 & LOW ^ c[3] ^ k[1], a & LOW]
        k = [k[0] + 0x9E3779B9 & LOW, k[1] + 0xBB67AE85 & LOW]
    return c


def honoured(p):
    """(how many of 2^16 values keep a weight, the factor of a kept weight)."""
    kept = 65536 - int(p * 65536 + 0.5)
    return kept, 65536 / kept if kept else 0.0


def dropout_kept(state, p, batch, heads, seq_q, seq_k):
    """(batch, heads, seq_q, seq_k) bool: the weights that stay. state: (2,) int64, seed and offset."""
    seed, offset = state.tolist()
    lead = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    stream = philox4x32([offset & LOW, offset >> 32 & LOW, *lead], [seed & LOW, seed >> 32 & LOW])
    i, j = torch.arange(seq_q)[:, None], torch.arange(seq_k)
    blocks = [(x // 16 * 4 + x % 8 // 2).expand(seq_q, seq_k) for x in (j, i)]
    words = philox4x32([*blocks, *stream[2:]], stream[:2])
    words = torch.stack([word.expand(batch, heads, seq_q, seq_k) for word in words])
    drawn = words[..., None] >> torch.tensor([0, 8, 16, 24]) & 0xFF  # (word, batch, heads, seq_q, seq_k, byte)
    tie = torch.zeros_like(words[0])
    for byte in drawn.movedim(-1, 1).flatten(0, 1):
        tie = tie ^ byte
    word, place = ((x % 2 + x % 16 // 8 * 2).expand(batch, heads, seq_q, seq_k) for x in (i, j))
    own = drawn.gather(0, word[None, ..., None].expand(1, *drawn.shape[1:]))[0].gather(-1, place[..., None])[..., 0]
    return own * 256 + tie < honoured(p)[0]


def dropout_factor(state, p, batch, heads, seq_q, seq_k):
    """(batch, heads, seq_q, seq_k) float64: what each weight is multiplied by."""
    kept, rescale = honoured(p)
    if kept == 65536:
        return torch.ones(batch, heads, seq_q, seq_k, dtype=torch.float64)
    return dropout_kept(state, p, batch, heads, seq_q, seq_k).double() * rescale
