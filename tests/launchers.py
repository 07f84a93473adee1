"""The launchers of src/cuda/launchers.h through the shims of tests/gpu, in a library built without torch."""

import ctypes

import torch

OPEN = (2**63 - 1) // 4  # Band::kOpen of params.h


class Launchers:
    """Calls a library that holds the shims; raises RuntimeError with the text of a launcher that refuses."""

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))

    def forward(self, q, k, v, out, lse, counter=None, band=(-OPEN, OPEN), scale=None, stream=None):
        """q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) into out (B, Hq, Sq, Dv) and lse (B, Hq, Sq)."""
        call = self.library.forward
        call.restype = ctypes.c_char_p
        call.argtypes = [ctypes.c_void_p] * 9 + [ctypes.c_int, ctypes.c_double, ctypes.c_void_p]
        strides = (ctypes.c_int64 * 12)(*(t.stride(axis) for t in (q, k, v, out) for axis in range(3)))
        sizes = (ctypes.c_int64 * 7)(q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3))
        limits = (ctypes.c_int64 * 2)(*band)
        error = call(*(t.data_ptr() if t is not None else None for t in (q, k, v, out, lse, counter)), strides, sizes,
                     limits, q.dtype == torch.bfloat16, q.size(3) ** -0.5 if scale is None else scale, stream)  # fmt: skip
        if error is not None:
            raise RuntimeError(error.decode())
