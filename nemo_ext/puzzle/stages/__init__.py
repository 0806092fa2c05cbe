"""The stages that look into a model."""
