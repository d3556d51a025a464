"""Options with a fixed set of answers. They stand apart because the command line needs them before torch is loaded."""

from __future__ import annotations

from typing import Literal

Mode = Literal["generate", "forced"]
"""How heads are profiled. generate: the model answers greedily, and a sample counts if it retrieved. forced: the answer
is fed, so that a model too weak to retrieve still gets a ranking."""

Credit = Literal["span", "copies"]
"""span: an answer step counts once if its token is one of the answer's (CompressKV, arXiv 2508.02401, Eq. 5). copies:
as often as the answer holds the token (CompressKV's public code)."""

Lookahead = Literal["trajectory", "proposals"]
"""What the draft reads while its attention is traced: the target's trajectory, or its own greedy proposals."""

Evaluation = Literal["srh", "all"]
"""Heads whose mean attention is the truth: the retrieval heads of every target layer, or all heads."""

Template = Literal["auto", "chat", "raw"]
"""How a document with a query becomes a prompt. auto: the chat template where the tokenizer has one."""

Heuristic = Literal["m", "k"]
"""How the paper's B_search, which it gives as 128, 192 and 256 tokens at k = 512, is read."""

Sampler = Literal["exact", "tpe", "gp", "brute"]
"""How m is searched. exact: the whole curve; the others are Optuna's own samplers."""

Objective = Literal["arr", "throughput"]
"""What a search maximises. arr: what is recovered at the given budget and depth. throughput: predicted tokens per
second, over budgets, depths, draft layers and m, as far as a rule about ARR lets it."""

Rule = Literal["within-1se", "least-arr"]
"""Which candidates are good enough. within-1se: mean ARR within one standard error of the best's, paired over
documents. least-arr: mean ARR at least a given one."""

DraftCache = Literal["full", "sink+window"]
"""What the draft attends to: everything, or as many first and last tokens as verification reads."""

DraftCaches = Literal["full", "sink+window", "both"]
"""Which of those may be chosen."""

RecallKind = Literal["multi-key", "multi-value", "multi-query", "variable-tracking"]
"""Generated retrieval. multi-key: one of many facts of the same form is asked. multi-value: all values of one key.
multi-query: several keys at once. variable-tracking: all variables that a chain of assignments gives one value."""

Side = Literal["held-out", "all"]
"""Of traced documents. held-out: those that the search did not see. all: with those on which everything was chosen."""
