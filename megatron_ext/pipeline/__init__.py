"""The readiness-driven pipeline (RRFP): tasks, hints, arbiter, stage executor, transports."""
