"""Modelling code that our Hugging Face exports carry: each file is copied as it is beside the exported config.json."""
