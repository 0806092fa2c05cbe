"""Packing of samples into rows of one length."""
