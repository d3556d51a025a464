"""LongBench (arXiv 2308.14508): its 16 English tasks with their own prompts, truncation and metrics."""
