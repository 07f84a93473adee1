"""Stock PyTorch against ours, in one run: the cases (cases.py), how they are checked and measured (measure.py), and what
comes out (output.py). `python -m torch_flashsdpa bench` and benchmarks/cpu.py are two doors to the same code."""
