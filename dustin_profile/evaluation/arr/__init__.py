"""Attention recovery of every policy that traces can tell of: by budget, split, layer and distance."""
