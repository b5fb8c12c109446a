"""hetkv for Hugging Face transformers: prefix reuse for hybrid-attention models, one sequence at a time."""

from .families import adapter_for, supported_model_types
from .prefix_cache import PrefixCache
from .schedule import Generation, Runner, TokenCounter, chunk_ends
from .session import Session
from .state import GroupState, PrefixState, Retention, Rows, StateAdapter, UnsupportedModelError
from .tie_rule import ABI_FAMILY, LOWEST_INDEX, TieRule, tie_rule_abi

__all__ = [
    "ABI_FAMILY",
    "LOWEST_INDEX",
    "Generation",
    "GroupState",
    "PrefixCache",
    "PrefixState",
    "Retention",
    "Rows",
    "Runner",
    "Session",
    "StateAdapter",
    "TieRule",
    "TokenCounter",
    "UnsupportedModelError",
    "adapter_for",
    "chunk_ends",
    "supported_model_types",
    "tie_rule_abi",
]
