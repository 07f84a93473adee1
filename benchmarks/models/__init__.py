"""Whole models, stock attention against ours: `python benchmarks/models`, see __main__.py."""
