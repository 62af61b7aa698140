"""Elastic rollouts: which executor samples which turn, what becomes of a trajectory, what the trainer is given."""
