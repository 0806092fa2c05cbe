"""Adapter for TRL: GRPO, RLOO, DPO and RPO on one machine, for Hugging Face models. TRL is only imported when used."""
