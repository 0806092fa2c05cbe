"""Adapter for NeMo Gym: servers for our environments, their data rows, and a folder where Gym finds both."""
