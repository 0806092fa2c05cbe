"""NeMo Gym: resources servers around the environments, the rows of their data, and a folder in which Gym finds them."""
