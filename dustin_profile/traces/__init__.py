"""Attention traces of teacher-forced trajectories: what the search and every evaluation read."""
