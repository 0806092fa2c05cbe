"""Conversations, as data, RL and quantisation see them."""
