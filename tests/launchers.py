"""The launchers of src/cuda/launchers.h through the shims of tests/gpu, in a library built without torch."""

import ctypes

import torch
from reference_dropout import honoured

OPEN = (2**63 - 1) // 4  # Band::kOpen of params.h
MANY_QUERIES = (0, 1, 1)  # the `way` of the instances for many queries


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool)  # in the order of params.h


def _strides(t):
    return [0 if size == 1 else step for size, step in zip(t.shape, t.stride())]


def _mask_arguments(mask, mask_plan):
    """Of a shim: data, dtype, layout, plan; some kernels take a mask without one."""
    if mask is None:
        return None, 0, None, None
    of_plan = (0, 0) if mask_plan is None else _strides(mask_plan)[:2]
    layout = (ctypes.c_int64 * 10)(*mask.shape, *_strides(mask), *of_plan)
    return mask.data_ptr(), DTYPES.index(mask.dtype), layout, None if mask_plan is None else mask_plan.data_ptr()


def _term_arguments(softcap=0.0, slopes=None, diagonal=0, sinks=None, rng_state=None, dropout_p=0.0, batch_invariant=False):
    """Of a shim: pointers, numbers. slopes and sinks (Hq,) or (B, Hq), rng_state (2,)."""
    def strides(t):
        return (0, 0) if t is None else (t.stride(0) if t.dim() == 2 else 0, t.stride(-1))

    drops = rng_state is not None and dropout_p > 0
    kept, rescale = honoured(dropout_p) if drops else (2**16, 1.0)
    tensors = (slopes, sinks, *([rng_state[0], rng_state[1]] if drops else [None, None]))
    pointers = (ctypes.c_void_p * 4)(*(None if t is None else t.data_ptr() for t in tensors))
    numbers = (ctypes.c_double * 9)(softcap, *strides(slopes), diagonal, *strides(sinks), kept, rescale, batch_invariant)
    return pointers, numbers


def band_of(is_causal, bottom_right, window_left, window_right, seq_q, seq_k):
    """(lo, hi) of params.h for the arguments of the op."""
    offset = seq_k - seq_q if bottom_right else 0
    high = [offset + window_right] * (window_right >= 0) + [offset] * is_causal
    return (offset - window_left if window_left >= 0 else -OPEN), min(high, default=OPEN)


class Launchers:
    """Calls a library that holds the shims; raises RuntimeError with the text of a launcher that refuses."""

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))

    def forward(self, q, k, v, out, lse, counter=None, band=(-OPEN, OPEN), scale=None, stream=None, way=None,
                mask=None, mask_plan=None, **terms):
        """q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv) into out (B, Hq, Sq, Dv) and lse (B, Hq, Sq). `way`:
        (consumers, heads packed, splits) of the instances for few queries, MANY_QUERIES, or None: as planned. mask
        (B|1, Hq|1, Sq|1, Sk|1) with its plan (B|1, Hq|1, words); terms as _term_arguments takes them."""
        call = self.library.forward
        call.restype = ctypes.c_char_p
        call.argtypes = (
            [ctypes.c_void_p] * 12 + [ctypes.c_int] + [ctypes.c_void_p] * 4 + [ctypes.c_int, ctypes.c_double, ctypes.c_void_p])
        strides = (ctypes.c_int64 * 12)(*(t.stride(axis) for t in (q, k, v, out) for axis in range(3)))
        sizes = (ctypes.c_int64 * 7)(q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3))
        limits = (ctypes.c_int64 * 2)(*band)
        way = (ctypes.c_int32 * 3)(*way) if way else None
        scratch_bytes = self.library.forward_scratch
        scratch_bytes.restype = ctypes.c_int64
        scratch_bytes.argtypes = [ctypes.c_void_p] * 6
        mask_arguments, term_arguments = _mask_arguments(mask, mask_plan), _term_arguments(**terms) if terms else (None, None)
        scratch = torch.full((scratch_bytes(sizes, limits, way, mask_arguments[2], *term_arguments) // 4,), float("nan"), device=q.device)
        tensors = (q, k, v, out, lse, counter, scratch if scratch.numel() else None)
        error = call(*(t.data_ptr() if t is not None else None for t in tensors), strides, sizes, limits, way,
                     *mask_arguments, *term_arguments, q.dtype == torch.bfloat16, q.size(3) ** -0.5 if scale is None else scale,
                     stream)  # fmt: skip
        if error is not None:
            raise RuntimeError(error.decode())

    def mask_plan(self, mask, plan, stream=None):
        """The plan of mask (mb, mh, mq, mk), bool or a float bias, into int32 plan (mb, mh, words)."""
        call = self.library.mask_plan
        call.restype = ctypes.c_char_p
        call.argtypes = [ctypes.c_void_p, ctypes.c_int] + [ctypes.c_void_p] * 4
        sizes = (ctypes.c_int64 * 4)(*mask.shape)
        strides = (ctypes.c_int64 * 4)(*_strides(mask))
        error = call(mask.data_ptr(), DTYPES.index(mask.dtype), sizes, strides, plan.data_ptr(), stream)
        if error is not None:
            raise RuntimeError(error.decode())

    def backward(self, grad_out, q, k, v, out, lse, dq, dk, dv, grad_lse=None, band=(-OPEN, OPEN), scale=None,
                 deterministic=False, stream=None, mask=None, mask_plan=None, grad_mask=None, grad_sinks=None, **terms):
        """grad_out and out (B, Hq, Sq, Dv), lse and grad_lse (B, Hq, Sq) into dq, dk, dv, all of them or None; a mask as in forward,
        whose gradient goes into grad_mask; terms as _term_arguments takes them, the sinks' gradient into grad_sinks. Returns the
        scratch memory used, which starts as NaN."""
        call = self.library.backward
        call.restype = ctypes.c_char_p
        call.argtypes = ([ctypes.c_void_p] * 7 + [ctypes.c_int] + [ctypes.c_void_p] * 6 + [ctypes.c_int, ctypes.c_double, ctypes.c_int]
                         + [ctypes.c_void_p] * 3)
        tensors = (grad_out, q, k, v, out, dq, dk, dv)
        strides = (ctypes.c_int64 * 32)(*(0 if t is None else t.stride(axis) if t.size(3) > 1 or axis < 3 else 1
                                          for t in tensors for axis in range(4)))  # fmt: skip
        pointers = (ctypes.c_void_p * 8)(*(t.data_ptr() if t is not None else None for t in tensors))
        sizes = (ctypes.c_int64 * 7)(q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3))
        limits, needed = (ctypes.c_int64 * 2)(*band), ctypes.c_int64(0)
        term_arguments = _term_arguments(**terms) if terms else (None, None)

        def run(scratch):
            error = call(pointers, strides, lse.data_ptr(), grad_lse.data_ptr() if grad_lse is not None else None, sizes,
                         limits, *_mask_arguments(mask, mask_plan), grad_mask.data_ptr() if grad_mask is not None else None,
                         *term_arguments, grad_sinks.data_ptr() if grad_sinks is not None else None, q.dtype == torch.bfloat16,
                         q.size(3) ** -0.5 if scale is None else scale, deterministic, scratch, ctypes.byref(needed), stream)  # fmt: skip
            if error is not None:
                raise RuntimeError(error.decode())

        run(None)
        scratch = torch.full((max(1, needed.value // 4),), float("nan"), device=q.device)  # null asks for the size
        run(scratch.data_ptr())
        return scratch
