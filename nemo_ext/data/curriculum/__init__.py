"""RL curricula: prompts' pass rates from rollouts, and the order in which a run trains on the prompts."""
