"""RL curricula: pass rates of prompts from rollouts, and prompts in the order in which a run trains on them."""
