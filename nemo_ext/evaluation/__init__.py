"""Evaluation: benchmarks, their statistics, reports and comparisons (docs/evaluation.md)."""
