"""Every case, those of one model in a row, since they share it."""

from . import decoders, diffusion, encoder_decoders, encoders, vision

CASES = [*decoders.CASES, *encoders.CASES, *encoder_decoders.CASES, *diffusion.CASES, *vision.CASES]
