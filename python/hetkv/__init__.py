"""hetkv: a typed KV-cache allocator for hybrid-attention models.

``Cache`` is the entrance. A request goes probe -> admit -> schedule, write, settle -> publish -> free.
"""

from ._core import (
    CacheLayout,
    DType,
    FieldSpec,
    GroupSpec,
    HashedPrefix,
    Namespace,
    ObjectKind,
    PinnedPrefix,
    PublishOutcome,
    Retention,
    StepStamp,
)
from .cache import Cache
from .errors import (
    AdmissionError,
    ArgumentError,
    HetkvError,
    LayoutError,
    NotClearedError,
    PendingError,
    PositionError,
    RouteError,
    StaleVersionError,
)
from .layout import layout_from_config
from .report import HitReport, Loss, LossReason
from .sequence import PublishResult, Sequence
from .step_buffers import StepBuffers
from .tiers import DiskTier, HostTier

CacheLayout.from_config = staticmethod(layout_from_config)  # type: ignore[method-assign]

__version__ = "0.1.0"

__all__ = [
    "AdmissionError",
    "ArgumentError",
    "Cache",
    "CacheLayout",
    "DType",
    "DiskTier",
    "FieldSpec",
    "GroupSpec",
    "HashedPrefix",
    "HetkvError",
    "HitReport",
    "HostTier",
    "LayoutError",
    "Loss",
    "LossReason",
    "Namespace",
    "NotClearedError",
    "ObjectKind",
    "PendingError",
    "PinnedPrefix",
    "PositionError",
    "PublishOutcome",
    "PublishResult",
    "Retention",
    "RouteError",
    "Sequence",
    "StaleVersionError",
    "StepBuffers",
    "StepStamp",
    "layout_from_config",
]
