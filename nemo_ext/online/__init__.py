"""Preference training in rounds on the policy's own responses: generate, judge, train, repeat (docs/rl/online.md)."""
