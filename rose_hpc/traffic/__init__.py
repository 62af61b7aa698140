"""Traffic to a serving engine: `trace` says which requests come when, `client` sends one, `replay` sends all open-loop, `record` keeps
what became of them, `spec` is what a replay is told, `cli` is `rose-hpc trace replay`.
"""
