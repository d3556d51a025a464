"""The methods' names, for help texts and completion: to import the methods themselves takes a second.

A test holds them equal to `policies.POLICIES`.
"""

from __future__ import annotations

FULL = ("vanilla", "sd", "magicdec")
"""Verify with the whole cache."""
LISTS = (
    *("dustin", "dustin-t", "dustin-d"),
    *("streaming", "streaming-prompt", "snapkv", "snapkv-8", "compresskv", "h2o", "specattn", "specattn-all"),
)
"""Verify over lists chosen before the target runs."""
BY_LAYER = ("quest", "quest-query-head")
"""Choose in each layer, from that layer's own queries."""
SPARSE = (*LISTS, *BY_LAYER)
METHODS = (*FULL, *SPARSE)
