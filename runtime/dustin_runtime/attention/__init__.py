"""Attention operations, one per file: dense, sparse (a list of kept positions), and scoring (rows of chosen heads)."""
