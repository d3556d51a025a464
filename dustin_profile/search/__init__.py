"""The configuration search on traces (arXiv 2606.24957, Alg. 1): layers, split and what each policy recovers."""
