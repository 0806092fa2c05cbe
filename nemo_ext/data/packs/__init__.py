"""Packing of samples into rows of equal length."""
