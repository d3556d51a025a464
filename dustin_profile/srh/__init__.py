"""Semantic retrieval heads: query heads that look at an answer while it is given (CompressKV, arXiv 2508.02401)."""
