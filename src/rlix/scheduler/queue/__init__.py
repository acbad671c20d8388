"""The queue in front of a pool: who is admitted next, who must make room, and why everybody else waits. Pure.

Read `jobs` (what there is), then `decide` (what follows); the rest are their parts.
"""
