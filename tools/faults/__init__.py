"""What tools/mutants plants: faults by the part that has them, each with the test that must notice."""

from . import binding, cpu, cuda, python

FAULTS = [*cpu.FAULTS, *cuda.FAULTS, *binding.FAULTS, *python.FAULTS]
