"""The methods' names, for help texts and completion: to import the methods themselves takes a second.

A test holds them equal to `policies.POLICIES`.
"""

from __future__ import annotations

PARTIAL_DRAFT = ("magicdec", "triforce")
"""Draft over a part of the draft's cache."""
FULL = ("vanilla", "sd", *PARTIAL_DRAFT)
"""Verify with the whole cache."""
LISTS = (
    *("dustin", "dustin-t", "dustin-d", "dustin-look", "dustin-rest", "dustin-rest-look", "dustin-merged"),
    *("streaming", "streaming-prompt", "snapkv", "snapkv-8", "compresskv", "h2o", "specattn", "specattn-all"),
)
"""Verify over lists chosen before the target runs."""
QUEST = ("quest", "quest-query-head")
BY_LAYER = (*QUEST, "smallkv")
"""Choose in each layer, while the target runs."""
SPARSE = (*LISTS, *BY_LAYER)
METHODS = (*FULL, *SPARSE)
