"""What runs and evaluations look like: tables for a terminal, and one HTML page with charts and rollouts."""
