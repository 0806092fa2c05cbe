"""TRL: GRPO, RLOO and DPO on one machine, on a Hugging Face model. Nothing here imports it before it is used."""
