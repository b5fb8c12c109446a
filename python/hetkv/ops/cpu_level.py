"""Which instruction set the CPU kernels of this process use."""

import torch

from . import _library  # noqa: F401  # the schemas must be there first

__all__ = ["CPU_LEVELS", "cpu_level"]

CPU_LEVELS = ("portable", "avx2", "avx512")
"""All levels, from the narrowest vectors to the widest."""


def cpu_level() -> str:
    """``"portable"``, ``"avx2"`` or ``"avx512"``: the best that this machine has, or what ``HETKV_CPU_LEVEL`` names.

    Results of different levels differ in their last bits. ``ValueError`` if the variable names no level, or one that this machine
    lacks.
    """
    return CPU_LEVELS[torch.ops.hetkv.cpu_level()]
