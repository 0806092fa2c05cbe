"""TRL: GRPO, RLOO and DPO on one machine, on a Hugging Face model. TRL is imported only when it is used."""
