"""Models that compute attention on hetkv's blocks directly: no state is copied out, batches may be ragged."""

from .attached_model import AttachedModel, AttachedRequest, Step, attach, detach
from .compiled_decode import CompiledDecode
from .paged_cache import PagedCache

__all__ = ["AttachedModel", "AttachedRequest", "CompiledDecode", "PagedCache", "Step", "attach", "detach"]
