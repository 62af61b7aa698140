"""`rose-hpc bench …`: timed claims, as ratios that are measured side by side in one run on the machine at hand.

Nothing here is imported by the parts that run in production. A part that is pinned, large or may be killed runs in a process of its own
(part.py), so that its memory and its affinity end with it.
"""
