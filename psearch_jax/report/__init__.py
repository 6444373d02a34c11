"""Reports on runs and evaluations: tables for a terminal, and one HTML page with charts and rollouts."""
