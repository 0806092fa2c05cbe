"""Preference training in rounds on the policy's own answers: generate, judge, train, and again (docs/rl/online.md)."""
