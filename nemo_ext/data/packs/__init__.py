"""Samples in rows of one length."""
