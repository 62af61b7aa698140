"""The parts of the rollout scheduler (../scheduler.py): its events, its records, what it learns, and its two ways to route."""
